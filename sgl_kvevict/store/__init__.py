"""Tiers outside the pool, the host's memory and files: how segments are found there, their format, and back ends."""
