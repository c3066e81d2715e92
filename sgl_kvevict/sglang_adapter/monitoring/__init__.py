"""What the cache shows to the outside: metrics, the event stream, the inspection socket, ``GET /server_info``."""

from __future__ import annotations
