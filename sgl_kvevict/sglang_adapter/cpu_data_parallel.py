"""Data-parallel attention on a CPU: torch in place of what SGLang does on GPUs only."""

from __future__ import annotations

from sglang.srt.distributed import parallel_state
from sglang.srt.layers import dp_attention
from sglang.srt.model_executor import forward_batch_info


def install() -> None:
    """Copy rows between ranks' buffers without Triton and custom operators, and counts without pinned memory.

    SGLang has all of that for its own CPU platform, and takes any other platform for a GPU.
    """
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    forward_batch_info._is_cpu = parallel_state._is_cpu = True
