"""Entry points that SGLang calls in every process; they must be cheap and safe to call repeatedly."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from sgl_kvevict.errors import KVEvictError
from sgl_kvevict.machine import CPU_PLATFORM
from sgl_kvevict.support import BACKEND_NAME

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Capacities of oneDNN's and PyTorch's caches of compiled matrix products; the default of both is 1024."""
KERNEL_CACHE_ENTRIES = 128
"""bfloat16 takes one entry (0.6 MB of machine code) per weight shape and number of tokens in a forward. With random
request lengths a scheduler grew by up to 1 GB, with 128 entries by 0.15 GB. A miss compiles for 2 to 3 ms."""
CPU_PLATFORM_CLASS = "sgl_kvevict.sglang_adapter.platform.KVEvictCpuPlatform"


def register() -> None:
    """Register tree, attention backend and hooks as ``kvevict`` (entry point ``sglang.srt.plugins``).

    SGLang only logs an exception raised here (:class:`UnsupportedSetupError` for an unsupported SGLang version). Its
    command line would then refuse the flags that select this plugin, without the reason. So a process that was started
    with these flags ends here; its last line is the reason.
    """
    try:
        _register()
    except Exception as error:
        # ``--flag kvevict`` and ``--flag=kvevict``.
        if not any(word.rpartition("=")[2] == BACKEND_NAME for word in sys.argv[1:]):
            raise
        if not isinstance(error, KVEvictError):
            logger.exception("kvevict: the plugin cannot be loaded")
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise SystemExit(f"sgl-kvevict: error: SGLang cannot load this plugin: {reason}") from error


def _register() -> None:
    # Imported here, so that what is wrong with SGLang's modules is raised in `register`, which tells it.
    from sgl_kvevict.sglang_adapter.compat import is_on, require_supported_sglang
    from sgl_kvevict.sglang_adapter.hooks import FEATURES

    # Before SGLang's modules are imported: another version shall be named, and not the import that fails in it.
    require_supported_sglang()
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    # SGLang may call this several times in one process; hooks would be applied as often.
    if get_radix_cache_factory(BACKEND_NAME) is not None:
        return
    register_radix_cache_backend(BACKEND_NAME, _build_tree)
    register_attention_backend(BACKEND_NAME)(_build_attention_backend)
    add_attention_backend_choices([BACKEND_NAME])
    for feature in filter(is_on, FEATURES):
        for hook in feature.hooks:
            hook.register()


def cpu_platform() -> str | None:
    """Return our CPU platform if ``SGLANG_PLATFORM=kvevict_cpu``, else None (entry point ``sglang.srt.platforms``).

    If selected, it also limits the caches of compiled matrix products, unless the environment already does.
    """
    from sglang.srt.environ import envs

    if envs.SGLANG_PLATFORM.get() != CPU_PLATFORM:
        return None
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(KERNEL_CACHE_ENTRIES))
    return CPU_PLATFORM_CLASS


def _build_tree(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    # Imported here, because entry points also run in processes without a scheduler.
    from sgl_kvevict.sglang_adapter.factory import build_tree

    return build_tree(ctx)


def _build_attention_backend(model_runner: ModelRunner) -> object:
    from sgl_kvevict.sglang_adapter.attention_backend import KVEvictAttentionBackend
    from sgl_kvevict.sglang_adapter.draft_attention import DraftAttentionBackend

    return (DraftAttentionBackend if model_runner.is_draft_worker else KVEvictAttentionBackend)(model_runner)
