"""Entry points that SGLang calls; they run in every SGLang process and must stay cheap and re-entrant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_kvevict.sglang_adapter.compat import BACKEND_NAME, HOOKS, require_supported_sglang

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.model_executor.model_runner import ModelRunner

CPU_PLATFORM_CLASS = "sgl_kvevict.sglang_adapter.platform.KVEvictCpuPlatform"


def register() -> None:
    """Register tree, attention backend and hooks under the name ``kvevict`` (entry point ``sglang.srt.plugins``).

    SGLang only logs an exception raised here and goes on without the plugin; selecting the backend by name then
    fails with "not registered", so a failure is never silent.

    Raises:
        UnsupportedSetupError: the installed SGLang is outside the supported range.
    """
    require_supported_sglang()
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    if get_radix_cache_factory(BACKEND_NAME) is not None:
        return
    register_radix_cache_backend(BACKEND_NAME, _build_tree)
    register_attention_backend(BACKEND_NAME)(_build_attention_backend)
    add_attention_backend_choices([BACKEND_NAME])
    for hook in HOOKS:
        hook.register()


def cpu_platform() -> str | None:
    """Offer the CPU platform (entry point ``sglang.srt.platforms``, name ``kvevict_cpu``).

    Returns:
        The platform class path when ``SGLANG_PLATFORM`` asks for it, else None: another machine's own platform
        must never be displaced by installing this package.
    """
    from sglang.srt.environ import envs

    return CPU_PLATFORM_CLASS if envs.SGLANG_PLATFORM.get() == "kvevict_cpu" else None


def _build_tree(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    from sgl_kvevict.sglang_adapter.factory import build_tree

    return build_tree(ctx)


def _build_attention_backend(model_runner: ModelRunner) -> object:
    from sgl_kvevict.sglang_adapter.attention_backend import KVEvictAttentionBackend

    return KVEvictAttentionBackend(model_runner)
