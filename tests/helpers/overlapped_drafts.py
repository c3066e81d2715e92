"""Servers that run drafts with the overlap schedule on a CPU, where SGLang switches it off: on a GPU it is the default.

``start(..., patch=overlapped_drafts.__name__)`` has a server import this module before anything else.
"""

from __future__ import annotations

import torch
from sglang.srt.arg_groups import speculative_hook
from sglang.srt.managers import overlap_utils
from torch import Tensor


def gather_rows(indices: Tensor, *buffers: Tensor | None) -> tuple[Tensor | None, ...]:
    """Rows ``indices`` of each buffer, in place of SGLang's Triton kernel ``gather_spec_extras``."""
    return tuple(None if buffer is None else torch.index_select(buffer, 0, indices) for buffer in buffers)


speculative_hook._disable_overlap_schedule_for_cpu = lambda _server_args: None
overlap_utils.gather_spec_extras = gather_rows
