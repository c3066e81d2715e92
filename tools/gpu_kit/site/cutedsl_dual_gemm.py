"""Stand-in for SGLang's module of this name, whose package (nvidia-cutlass-dsl, 95 MB) the kit does not carry.

The dual GEMM runs on Blackwell only. On another architecture SGLang's own ``can_use_dual_gemm`` returns False too, and
nothing else of the module is called.
"""

from __future__ import annotations

from enum import IntEnum

from sglang.srt.utils import is_sm100_supported

MAX_DUAL_GEMM_DECODE_TOKENS = 16


class DualGemmQuantMode(IntEnum):
    """Names that SGLang's callers use."""

    STATIC_PER_TENSOR = 0
    STATIC_PER_TOKEN = 1
    DYNAMIC_PER_TENSOR = 2
    DYNAMIC_PER_TOKEN = 3
    UNQUANT = 4

    @property
    def is_quantized(self) -> bool:
        """Whether operands are quantised."""
        return self is not DualGemmQuantMode.UNQUANT


def can_use_dual_gemm(num_tokens: int, hidden_size: int, intermediate_size: int, quant_mode: DualGemmQuantMode) -> bool:
    """False: the kit is for sm_90."""
    if is_sm100_supported():
        raise RuntimeError("the kit is for sm_90: nvidia-cutlass-dsl is not carried")
    return False
