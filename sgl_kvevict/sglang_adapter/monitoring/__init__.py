"""What the cache shows to the outside: metrics, event stream, inspection socket, ``GET /server_info``."""

from __future__ import annotations
