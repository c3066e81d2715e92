"""Views of the cache for operators: metrics, event socket, ``GET /server_info``."""
