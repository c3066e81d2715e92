"""The memory of other machines as a store: Mooncake's distributed store, over TCP or RDMA."""

from __future__ import annotations

import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sgl_kvevict.errors import ConfigError, StoreError, shown
from sgl_kvevict.store.backend import Backend, Item, check_name

TRIES = 4
TRY_AGAIN_S = 0.02
"""Delay before the first retry of a refused concurrent write; it doubles with each retry."""
MASTER_PORT = 50051
LISTING_PORT = 9003
BUFFER_BYTES = 256 * 1024**2
CONNECT_S = 2.0
"""Mooncake's own connection attempt takes 90 s when the master is down, so the port is tried first."""
RETRY_S = 5.0
_NO_OBJECT = -704
_WRITTEN_BY_ANOTHER = -601
_OPTIONS = ("protocol", "devices", "metadata", "host", "listing_port", "buffer_bytes")


class MooncakeBackend(Backend):
    """Objects in a Mooncake store, whose memory other processes (``mooncake_client``) provide.

    The connection is made when first needed, and again after a failure, so a server starts without its store.
    When memory is full the master decides what is removed.

    Args:
        url: ``mooncake://MASTER:PORT/NAME``, and options: ``protocol`` (tcp, rdma), ``devices`` of RDMA, ``metadata``
            (default: P2PHANDSHAKE), ``host`` (this machine's address), ``listing_port`` (of the master's HTTP server),
            ``buffer_bytes`` (the largest object).

    ConfigError: the package is not installed, or the URL has unknown parts.
    """

    # A listing that is no text raises a ValueError.
    _failures = (OSError, ValueError)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"store: got {url!r}, which needs the package mooncake-transfer-engine (without a GPU: "
                f"mooncake-transfer-engine-non-cuda) and the system's libibverbs1 and libnl-route-3: {error}"
            ) from error
        self._new: Callable[[], Any] = MooncakeDistributedStore
        self._parse(url)
        self._lock = threading.Lock()
        self._store: Any = None
        self._next_try = float("-inf")

    def _put(self, name: str, data: bytes) -> None:
        store, code = self._connected(), 0
        for attempt in range(TRIES):
            # Two servers that computed the same prefix write the same object at once, and Mooncake refuses one of them.
            code = store.upsert(f"{self._name}/{name}", data)
            if code != _WRITTEN_BY_ANOTHER:
                break
            time.sleep(TRY_AGAIN_S * 2**attempt)
        self._check("written", code)

    def _get(self, name: str, limit: int | None) -> bytes | None:
        # No ``limit``: Mooncake reads an object whole, and refuses one larger than ``buffer_bytes``.
        store = self._connected()
        for attempt in range(TRIES):
            data = bytes(store.get(f"{self._name}/{name}"))
            if data:  # no object is empty
                return data
            if not self._exists(name):
                return None
            time.sleep(TRY_AGAIN_S * 2**attempt)  # a write may be under way
        raise StoreError(f"store {self.url!r} cannot be read: {name} is listed, but the process that held it is gone")

    def _get_many(self, names: Sequence[str]) -> dict[str, bytes]:
        # Most prefixes of a prompt have no entry: one call says which do, so that only these are read.
        there = self._connected().batch_is_exist([f"{self._name}/{name}" for name in names]) if names else []
        return super()._get_many([name for name, code in zip(names, there, strict=True) if code > 0])

    def _exists(self, name: str) -> bool:
        return bool(self._check("read", self._connected().is_exist(f"{self._name}/{name}")))

    def _delete(self, name: str) -> bool:
        code = self._connected().remove(f"{self._name}/{name}", True)
        return code != _NO_OBJECT and self._check("changed", code) == 0

    def _list(self, prefix: str) -> Iterator[Item]:
        """Ask the master's HTTP server, which does not report when an object was last used."""
        store = self._connected()
        with urllib.request.urlopen(f"http://{self._host}:{self._listing_port}/get_all_keys", timeout=30) as response:
            keys = response.read().decode().split("\n")
        for key in keys:
            if key.startswith("/".join(part for part in (self._name, prefix) if part) + "/"):
                size = store.get_size(key)
                if size >= 0:  # else it was removed meanwhile
                    yield Item(key[len(self._name) + 1 :], size, time.time())

    def _parse(self, url: str) -> None:
        allowed = f"mooncake://HOST:PORT/NAME, and options: {', '.join(_OPTIONS)}"
        try:
            parts = urllib.parse.urlsplit(url)
            options = dict(urllib.parse.parse_qsl(parts.query, strict_parsing=bool(parts.query)))
            self._host, self._port = parts.hostname or "", parts.port or MASTER_PORT
            self._name = check_name(parts.path.strip("/"))
            self._listing_port = int(options.get("listing_port", LISTING_PORT))
            self._buffer_bytes = int(options.get("buffer_bytes", BUFFER_BYTES))
        except ValueError as error:
            raise ConfigError(f"store: got {url!r}: {error}; allowed: {allowed}") from error
        if not self._host or parts.fragment or options.keys() - set(_OPTIONS):
            raise ConfigError(f"store: got {url!r}; allowed: {allowed}")
        if options.get("protocol", "tcp") not in ("tcp", "rdma"):
            raise ConfigError(f"store: got protocol {shown(options['protocol'])}; allowed: tcp, rdma")
        self._options = options

    def _connected(self) -> Any:
        with self._lock:
            if self._store is None:
                # While the master is down, every prompt would wait `CONNECT_S`.
                if time.monotonic() < self._next_try:
                    raise StoreError(f"store {self.url!r} cannot be reached")
                self._next_try = time.monotonic() + RETRY_S
                self._store = self._connect()
            return self._store

    def _connect(self) -> Any:
        try:
            with socket.create_connection((self._host, self._port), timeout=CONNECT_S) as probe:
                # The address of this machine on the way to the master is the one that others can reach.
                here = probe.getsockname()[0]
        except OSError as error:
            raise StoreError(f"store {self.url!r} cannot be reached: {error}") from error
        store, options = self._new(), self._options
        code = store.setup(
            options.get("host", here),
            options.get("metadata", "P2PHANDSHAKE"),
            0,  # provides no memory, which would be lost with this process
            self._buffer_bytes,
            options.get("protocol", "tcp"),
            options.get("devices", ""),
            f"{self._host}:{self._port}",
        )
        self._check("reached", code)
        return store

    def _check(self, what: str, code: int) -> int:
        if code < 0:
            raise StoreError(f"store {self.url!r} cannot be {what}: Mooncake's error {code}")
        return code
