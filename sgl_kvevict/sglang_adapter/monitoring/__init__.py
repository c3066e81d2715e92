"""Who is told what the cache does, and what can be asked of it: counters, metrics, events, inspection."""

from __future__ import annotations
