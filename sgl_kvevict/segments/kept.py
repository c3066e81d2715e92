"""Share of tokens that each (layer, KV head) of a span keeps, for pictures."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kvevict.ragged import run_entries
from sgl_kvevict.segments.segment import Span


def kept_share(span: Span, num_bins: int) -> Tensor:
    """[num_layers * num_kv_heads, num_bins], float32: kept share of the tokens of each bin of a live span.

    Token ``t`` is in bin ``t * num_bins // num_tokens``. ValueError if ``num_bins`` is not in [1, num_tokens].
    """
    if not 1 <= num_bins <= span.num_tokens:
        raise ValueError(f"num_bins must be between 1 and the span's {span.num_tokens} tokens, got {num_bins}")
    runs, segment = span.runs(), span.segment
    lens = runs.lens.flatten().long()
    run_of_entry = torch.repeat_interleave(lens)
    entries = run_entries(runs.starts, lens, len(run_of_entry))
    tokens = segment.storage.positions[entries].long() - span.start
    cells = run_of_entry * num_bins + tokens * num_bins // span.num_tokens
    kept = torch.bincount(cells, minlength=len(lens) * num_bins).view(len(lens), num_bins)
    bin_of_token = torch.arange(span.num_tokens, device=lens.device) * num_bins // span.num_tokens
    return kept / torch.bincount(bin_of_token, minlength=num_bins).float()
