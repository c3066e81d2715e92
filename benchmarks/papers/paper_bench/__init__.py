"""What the papers claim of their methods, tested on the demo model without a server."""
