"""Attention of many new tokens of a request over compressed spans and its own tokens, on a GPU."""
