"""What each (layer, KV head) of a span keeps, for pictures and tables."""

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
    num_runs, kept = span.segment.geometry.num_runs, torch.zeros(0)
    for runs in span.runs():
        lens = runs.lens.flatten().long()
        run_of_entry = torch.repeat_interleave(lens)
        tokens = runs.positions[run_entries(runs.starts, lens, len(run_of_entry))].long() - span.start
        cells = run_of_entry * num_bins + tokens * num_bins // span.num_tokens
        counts = torch.bincount(cells, minlength=num_runs * num_bins).view(num_runs, num_bins)
        kept = counts if not kept.numel() else kept + counts
    bin_of_token = torch.arange(span.num_tokens, device=kept.device) * num_bins // span.num_tokens
    return kept / torch.bincount(bin_of_token, minlength=num_bins).float()


def entries_by_head(span: Span) -> dict[int, Tensor]:
    """Entries of a live span that each (layer, KV head) stores, by the bits of their rows.

    The values are [num_layers * num_kv_heads], int32.
    """
    counts: dict[int, Tensor] = {}
    for runs in span.runs():  # sinks, then the others
        lens = runs.lens.flatten()
        counts[runs.bits] = counts[runs.bits] + lens if runs.bits in counts else lens
    return counts
