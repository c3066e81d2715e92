"""LoRA adapters of namespaces: SGLang appends the id of a request's adapter to the ``extra_key`` of its client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_kvevict.cache.nodes import NamespaceKey

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.events import LoRANameTable

ID_CHARS = 32
"""Characters of an adapter's id: a UUID in hexadecimal digits."""


def namespace_of_request(req: Req) -> NamespaceKey:
    """The namespace of a request's prefixes; SGLang has appended the adapter's id to the client's ``extra_key``."""
    return req.extra_key, req.cache_salt or None


def adapter_of(namespace: NamespaceKey, loaded: LoRANameTable) -> str | None:
    """Id of the adapter with which a namespace's prefixes are computed; None: the model alone.

    ``loaded`` has the adapters that SGLang has loaded, also those that it has unloaded since. A request without an
    adapter whose client's key ends with such an id is refused (``request_check.py``), so that no namespace has both.
    """
    extra_key = namespace[0]
    # SGLang appends the id without a separator, so only its length tells where it begins.
    return None if extra_key is None or loaded.resolve(extra_key) is None else extra_key[-ID_CHARS:]
