"""Attention of new tokens over compressed spans and uncompressed tokens."""
