"""Views of the cache for operators: metrics, event stream, inspection socket, ``GET /server_info``."""

from __future__ import annotations
