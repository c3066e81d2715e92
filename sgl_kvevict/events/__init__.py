"""Event stream and inspection of the cache: wire format, publishing thread, clients."""
