"""What the policies cost and what they keep, on real prompts of the demo model, without a server."""
