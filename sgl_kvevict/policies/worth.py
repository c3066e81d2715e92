"""Worth: one int16 per kept entry; a squeeze evicts the lowest first."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kvevict.policies.parts import RangeScores

_MAX = torch.finfo(torch.float16).max


def worth_of(scores: RangeScores, kept: Tensor, flat: Tensor, *, comparable: bool) -> Tensor:
    """[num_entries], int16: worth of the kept entries of a range, in the order of the scores rounded to float16.

    Scores that are not comparable are replaced by their rank within the (layer, head), so that all heads shrink alike.
    Pinned tokens get the largest worth.
    ``kept`` is [num_layers, num_kv_heads, num_tokens], bool; ``flat`` [num_entries], int64, its set elements' indices.
    """
    values = scores.values.clamp(-_MAX, _MAX)
    if values.shape[0] < kept.shape[0]:
        per_row = -(-kept.shape[0] // values.shape[0])
        values = values.repeat_interleave(per_row, dim=0)[: kept.shape[0]]
    if not comparable:
        order = values.masked_fill(~kept, float("-inf")).argsort(dim=-1, descending=True, stable=True)
        places = torch.arange(kept.shape[-1], device=kept.device).expand_as(order)
        ranks = torch.empty_like(order).scatter_(-1, order, places)
        values = 1 - ranks / kept.sum(-1, keepdim=True).clamp(min=1)
    values[..., : scores.num_first] = _MAX
    values[..., values.shape[-1] - scores.num_last :] = _MAX
    return _as_worth(values.flatten()[flat])


def measured_worth(worth: Tensor, scores: Tensor) -> Tensor:
    """Worth by measured reader attention; pinned entries keep the largest worth.

    ``worth`` is [num_entries], int16; ``scores`` [num_entries], float32, comparable over layers and heads.
    """
    most = _as_worth(scores.new_full((1,), _MAX))
    return torch.where(worth == most, worth, _as_worth(scores.clamp(-_MAX, _MAX)))


def scores_of(worth: Tensor) -> Tensor:
    """The scores, float32, that entries have by their ``worth`` ([num_entries], int16)."""
    return torch.where(worth < 0, worth ^ 0x7FFF, worth).view(torch.float16).float()


def _as_worth(values: Tensor) -> Tensor:
    bits = (values.half() + 0.0).view(torch.int16)  # + 0.0: -0.0 becomes 0.0
    return torch.where(bits < 0, bits ^ 0x7FFF, bits)
