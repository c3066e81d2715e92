"""A CPU platform for stock SGLang: torch-native allocators and writers, no compiled SGLang kernels."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities
from torch import Tensor

from sgl_kvevict.errors import UnsupportedSetupError

STAND_INS = "kvevict_tools"
"""Package of a checkout with torch in place of the kernels of speculative decoding, which SGLang compiles for GPUs."""


class KVEvictCpuPlatform(CpuSRTPlatform):
    """Runs stock SGLang on any CPU, with ``SGLANG_PLATFORM=kvevict_cpu`` and ``--device cpu``.

    SGLang's own CPU path needs an AMX build of its kernels; out-of-tree platforms use its generic torch code.
    """

    # SGLang takes its generic torch code for out-of-tree platforms alone.
    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_dispatch_key_name(self) -> str:
        """Return the kernel family of ``MultiPlatformOp``: plain torch."""
        return "native"

    def get_default_attention_backend(self) -> str:
        """Return the stock backend that runs on any device."""
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Return the backend of ``torch.compile``: none."""
        return "eager"

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        """Return the arena pool if our backend is selected; None: SGLang's pool, whose buffers hooks may replace."""
        from sgl_kvevict.sglang_adapter.arena import ArenaKVPool, kvevict_is_selected

        return ArenaKVPool if kind == "mha" and kvevict_is_selected() else None

    def get_speculative_cache_locs_fn(self) -> Callable[..., Tensor]:
        """Return the function that looks up the slots of draft tokens."""
        cache_locs: Callable[..., Tensor] = _stand_ins().cache_locs
        return cache_locs

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        """Put torch in place of compiled kernels if our backend is selected; SGLang's own workers use it."""
        from sgl_kvevict.sglang_adapter.arena import kvevict_is_selected

        if kvevict_is_selected():
            # SGLang builds its own worker next, which finds the stand-ins.
            _stand_ins().install()
        return None

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Return whether SGLang's worker of an algorithm has all that it needs; NGRAM's is not asked for."""
        return algorithm in ("STANDALONE", "EAGLE", "EAGLE3")


def _stand_ins() -> ModuleType:
    if find_spec(STAND_INS) is None:
        reason = "speculative decoding on a CPU: the kernels' stand-ins are not in the wheel; allowed: in a checkout "
        raise UnsupportedSetupError([f"{reason}(make setup), on a GPU, or no --speculative-algorithm"])
    return import_module(f"{STAND_INS}.cpu_speculation")


def share_rows_on_cpu() -> None:
    """Data-parallel attention: copy rows between ranks' buffers without Triton, and counts without pinned memory.

    SGLang has all of that for its own CPU platform, and takes any other platform for a GPU.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor import forward_batch_info

    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    forward_batch_info._is_cpu = parallel_state._is_cpu = True
