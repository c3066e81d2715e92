"""LoRA adapters of namespaces, as the requests that computed their prefixes said."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sgl_kvevict.cache.nodes import NamespaceKey

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

LEAST_KNOWN = 1024
"""Namespaces that are remembered before those out of use are looked for."""


def namespace_of_request(req: Req) -> NamespaceKey:
    """The namespace of a request's prefixes; SGLang has appended the adapter's id to the client's ``extra_key``."""
    return req.extra_key, req.cache_salt or None


class AdapterNamespaces:
    """The adapter of every namespace that has one.

    A node knows its namespace only, and a client's ``extra_key`` may end like an adapter's id, so the adapter is noted
    when a request looks up its prompt, before anything is computed for it. ``in_use`` lists the namespaces of cached
    prefixes and live requests; others are forgotten when the table has doubled.
    """

    def __init__(self, in_use: Callable[[], Iterable[NamespaceKey]]) -> None:
        self._in_use = in_use
        self._adapters: dict[NamespaceKey, str] = {}
        self._limit = LEAST_KNOWN

    def __len__(self) -> int:
        return len(self._adapters)

    def note(self, req: Req) -> None:
        """Remember the adapter of a request's namespace; nothing if it has none."""
        if req.lora_id is None:
            return
        if len(self._adapters) >= self._limit:
            used = set(self._in_use())
            self._adapters = {name: adapter for name, adapter in self._adapters.items() if name in used}
            self._limit = max(LEAST_KNOWN, 2 * len(self._adapters))
        self._adapters[namespace_of_request(req)] = req.lora_id

    def of(self, namespace: NamespaceKey) -> str | None:
        """Id of the adapter with which a namespace's prefixes were computed; None: the model alone."""
        return self._adapters.get(namespace)
