"""The memory of other machines as a store: Mooncake's distributed store, over TCP or RDMA."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from sgl_kvevict.errors import ConfigError, StoreError, shown
from sgl_kvevict.store.backend import Item, check_name, is_name, update_without_lock

TRIES = 4
TRY_AGAIN_S = 0.02
"""Of two who write one object at once one is refused, and tries again after so long, then after twice as long."""
MASTER_PORT = 50051
LISTING_PORT = 9003
BUFFER_BYTES = 256 * 1024**2
CONNECT_S = 2.0
"""Mooncake itself tries for 90 s to find a master that is not there."""
RETRY_S = 5.0
_NO_OBJECT = -704
_WRITTEN_BY_ANOTHER = -601
_OPTIONS = ("protocol", "devices", "metadata", "host", "listing_port", "buffer_bytes")


class MooncakeBackend:
    """Objects in a Mooncake store, whose memory other processes give (``mooncake_client``), not this one.

    The connection is made when it is first needed, and again after it failed: a server starts without its store. There
    is no lock: of two writers that change a manifest at once one may be lost, so who writes looks again and repeats it.
    What is pushed out when memory is full is the master's business.

    Args:
        url: ``mooncake://MASTER:PORT/NAME``, and options: ``protocol`` (tcp, rdma), ``devices`` of RDMA, ``metadata``
            (default: P2PHANDSHAKE), ``host`` (this machine's address), ``listing_port`` (of the master's HTTP server),
            ``buffer_bytes`` (the largest object).

    Raises:
        ConfigError: the package is not installed, or the URL has parts that it cannot have.
    """

    def __init__(self, url: str) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"store: got {url!r}, which needs the package mooncake-transfer-engine (without a GPU: "
                f"mooncake-transfer-engine-non-cuda) and the system's libibverbs1 and libnl-route-3: {error}"
            ) from error
        self._new: Callable[[], Any] = MooncakeDistributedStore
        self._url = url
        self._parse(url)
        self._lock = threading.Lock()
        self._store: Any = None
        self._next_try = float("-inf")

    @property
    def url(self) -> str:
        """As it was given."""
        return self._url

    def put(self, name: str, data: bytes) -> None:
        """See :meth:`Backend.put`."""
        store, code = self._connected(), 0
        for attempt in range(TRIES):
            code = store.upsert(self._key(name), data)
            if code != _WRITTEN_BY_ANOTHER:
                break
            time.sleep(TRY_AGAIN_S * 2**attempt)
        self._check("written", code)

    def get(self, name: str) -> bytes | None:
        """See :meth:`Backend.get`."""
        store = self._connected()
        for attempt in range(TRIES):
            data = bytes(store.get(self._key(name)))
            if data:  # nothing empty is ever stored
                return data
            if not self.exists(name):
                return None
            time.sleep(TRY_AGAIN_S * 2**attempt)  # somebody may be writing it
        raise StoreError(f"store {self.url!r} cannot be read: {name} is listed, but who held it is gone")

    def exists(self, name: str) -> bool:
        """See :meth:`Backend.exists`."""
        return bool(self._check("read", self._connected().is_exist(self._key(name))))

    def delete(self, name: str) -> bool:
        """See :meth:`Backend.delete`; at once, though somebody may have read it just now."""
        code = self._connected().remove(self._key(name), True)
        return code != _NO_OBJECT and self._check("changed", code) == 0

    def list(self, prefix: str = "") -> Iterator[Item]:
        """See :meth:`Backend.list`; asks the master's HTTP server. When something was used it does not say."""
        store, within = self._connected(), self._key(prefix) + "/" if prefix else self._name + "/"
        address = f"http://{self._host}:{self._listing_port}/get_all_keys"
        try:
            with urllib.request.urlopen(address, timeout=30) as response:
                keys = response.read().decode().split("\n")
        except (OSError, ValueError) as error:
            raise StoreError(f"store {self.url!r} cannot be read: {address}: {error}") from error
        for key in keys:
            name = key[len(self._name) + 1 :]
            size = store.get_size(key) if key.startswith(within) and is_name(name) else -1
            if size >= 0:  # removed since, otherwise
                yield Item(name, size, time.time())

    def update(self, name: str, change: Callable[[bytes | None], bytes]) -> None:
        """See :meth:`Backend.update`."""
        update_without_lock(self, name, change, TRIES)

    # ---- inside -----------------------------------------------------------------------------------------------

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
                if time.monotonic() < self._next_try:
                    raise StoreError(f"store {self.url!r} cannot be reached")
                self._next_try = time.monotonic() + RETRY_S
                self._store = self._connect()
            return self._store

    def _connect(self) -> Any:
        master = (self._host, self._port)
        try:
            with socket.create_connection(master, timeout=CONNECT_S) as probe:
                here = probe.getsockname()[0]
        except OSError as error:
            raise StoreError(f"store {self.url!r} cannot be reached: {error}") from error
        store, options = self._new(), self._options
        code = store.setup(
            options.get("host", here),
            options.get("metadata", "P2PHANDSHAKE"),
            0,  # no memory of ours for others: it would go with this process
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

    def _key(self, name: str) -> str:
        return f"{self._name}/{check_name(name)}"
