"""Replays conversations of coding agents through prefix caches: SGLang's tree, and ours, without a model."""
