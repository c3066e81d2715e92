"""``sgl-kvevict top --web``: a page that shows the tree, live, on this machine's loopback only.

``/`` is the page; ``/tree``, ``/node/ID`` and ``/text/ID`` are the JSON that it asks for. Nothing is read from disk by
name, and nothing can be changed. Pages of other sites get no answer: neither one whose name leads here (DNS rebinding:
another name in ``Host``), nor one that embeds ours (``Sec-Fetch-Site``).
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from sgl_kvevict.cli import inspect as inspection
from sgl_kvevict.errors import ConfigError, KVEvictError
from sgl_kvevict.events.client import check_endpoint

_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")
_NODE = re.compile(r"/(node|text)/(\d{1,18})")
_NUM_NODES, _NUM_BINS = 5000, 256
MAX_CONNECTIONS = 32
"""Connections at once, each of which has a thread; a page uses one or two, and a browser opens at most six."""
REQUEST_S = 10.0
"""Longest wait for the next bytes of a request, and for a client to take those of an answer."""


class WebServer(ThreadingHTTPServer):
    """Serves the page at ``http://127.0.0.1:PORT``, a thread per connection, which is for one request.

    At most ``MAX_CONNECTIONS`` are open, further ones are closed; so is one that is silent for ``REQUEST_S``.

    Args:
        endpoint: the event socket of the server to watch.
        port: 0 takes a free one (``server_port``).
        interval_s: seconds between two questions of an open page.
        timeout_s: seconds to wait for each answer of the server.

    Raises:
        ConfigError: the endpoint is not an address, or the port is taken.
    """

    daemon_threads = True

    def __init__(self, endpoint: str, port: int, interval_s: float, timeout_s: float) -> None:
        self.endpoint = check_endpoint(endpoint)
        self.interval_s = interval_s
        self._decoder = cache(inspection.load_decoder)
        self._timeout_s = timeout_s
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ConfigError(f"--web: got {port}: {error.strerror}; allowed: a free port, or 0 to take one") from error

    def verify_request(self, request: object, client_address: object) -> bool:
        """Whether a connection may have a thread; it is closed otherwise."""
        # Never waits: this is the thread that accepts connections.
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print an error as usual, but not that a page was closed in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def tree(self) -> Mapping[str, object]:
        """Return the whole tree, without what heads kept."""
        ask = partial(inspection.ask_snapshot, limit=_NUM_NODES)
        found = inspection.asked(self.endpoint, self._timeout_s, ask)
        about, tree = msgspec.to_builtins(found.about) | {"endpoint": found.endpoint}, found.tree
        sizes = {"pool": tree.pool, "gauges": found.status.gauges, "totals": found.status.totals}
        return {"about": about, "ts": tree.ts, **sizes, "nodes": tree.nodes, "omitted": tree.omitted}

    def node(self, number: int, *, bins: int = _NUM_BINS) -> Mapping[str, object]:
        """Return what heads kept of a node (None: everything, or it is gone), and its tokens if they are exposed."""
        ask = partial(inspection.ask_node, node=number, bins=bins)
        about, kept, ids = inspection.asked(self.endpoint, self._timeout_s, ask)
        tokens: list[str] | None = None
        if ids is not None:
            decode = self._decoder(about.tokenizer)
            tokens = decode(ids) if decode else [f"[{token}]" for token in ids]
        return {"map": kept, "tokens": tokens}


class _Handler(BaseHTTPRequestHandler):
    server: WebServer
    timeout = REQUEST_S

    def do_GET(self) -> None:
        """Answer the page or its questions."""
        # Programs that send no such header are no browser, so no page is behind them.
        is_own = self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        if not is_own or not _HOST.fullmatch(self.headers.get("Host", "")):
            return self.send_error(HTTPStatus.FORBIDDEN, "this page is for 127.0.0.1 and localhost only")
        node = _NODE.fullmatch(self.path)
        if self.path == "/":
            page = inspection.page(self.server.interval_s)
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.encode())
        elif self.path == "/tree":
            self._send_json(self.server.tree)
        elif node:
            self._send_json(lambda: self.server.node(int(node[2]), bins=1 if node[1] == "text" else _NUM_BINS))
        else:
            self.send_error(HTTPStatus.NOT_FOUND, "allowed: /, /tree, /node/ID and /text/ID")

    def _send_json(self, content: Callable[[], Mapping[str, object]]) -> None:
        try:
            status, found = HTTPStatus.OK, content()
        except KVEvictError as error:  # the watched server is silent, or refused
            status, found = HTTPStatus.BAD_GATEWAY, {"error": str(error)}
        self._send(status, "application/json", msgspec.json.encode(found))

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        # No other site may show the page in a frame, or read text of a prompt as a script.
        headers |= {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""
