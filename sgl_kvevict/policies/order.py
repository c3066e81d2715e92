"""Order: one int16 key per entry of a range, by which fewer slots keep the best entries.

Entries that a policy keeps at the share that it was asked for have keys >= 0, all others keys < 0. So the best entries,
as many as the share holds, are exactly the policy's choice, and every smaller choice is a part of every larger one.
Pinned entries have the largest keys. First tokens have :data:`PINNED`, last tokens the keys below it, the later the
larger: so all heads would lose the same ones. Among equal keys the lower (layer, head) comes first, then the lower
position (:func:`kvevict_kernels.radix_select.largest_entries`).

Within both halves entries are ordered by their scores, if these are comparable across heads: rounded to float16 without
the last bit of its mantissa (a relative step of 1/512). Other scores give ranks within the (layer, head), as a share of
the head's entries in this half, so that all heads shrink alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kvevict.policies.parts import RangeScores
from sgl_kvevict.policies.ranking import order_keys

PINNED = 2**15 - 1
"""Key of first tokens that every head keeps without competing."""
NUM_LAST_KEYS = 256
"""Keys below it that last tokens have which every head keeps; earlier ones of these tokens share the smallest."""
LARGEST = PINNED - NUM_LAST_KEYS - 1
"""Largest key of an entry that competes."""
_HALF = 2**14
_SIGN = -(2**15)


@dataclass(frozen=True, eq=False)
class RangeOrder:
    """The order of all entries of a range, and what tells whether it may be used.

    Attributes:
        policy: name of the policy that made it.
        keys: [num_layers, num_kv_heads, num_tokens], int16.
        total: entries that the policy had to keep at its budget.
        facts: [2], int64, on the host: how many scores are NaN or infinite, and how many entries are kept. From a
            device they are copied asynchronously: wait for the stream that computes them before :meth:`check`.
    """

    policy: str
    keys: Tensor
    total: int
    facts: Tensor

    def check(self) -> None:
        """ValueError if a score is no finite number, or the policy kept another number of entries."""
        num_wrong, num_kept = self.facts.tolist()
        of_range = f"of a range of {tuple(self.keys.shape)} (layers, KV heads, tokens)"
        if num_wrong:
            raise ValueError(
                f"policy {self.policy!r}: {num_wrong} scores {of_range} are NaN or infinite; allowed: finite numbers"
            )
        if num_kept != self.total:
            raise ValueError(f"policy {self.policy!r} kept {num_kept} entries {of_range} instead of {self.total}")


def facts_of(scores: RangeScores, kept: Tensor) -> Tensor:
    """:attr:`RangeOrder.facts` of a policy's scores and choice; no host sync."""
    given = [each for each in (scores.values, scores.tie_break, scores.importance) if each is not None]
    num_wrong = torch.stack([each.isfinite().logical_not_().sum() for each in given]).sum()
    # Checked when the order is used: to ask now would wait for the ranking.
    return torch.stack([num_wrong, kept.sum()]).to("cpu", non_blocking=True)


def order_of(scores: RangeScores, kept: Tensor, *, comparable: bool) -> Tensor:
    """[num_layers, num_kv_heads, num_tokens], int16: the keys of all entries of a range.

    ``kept``, bool, of the same shape, is what the policy keeps at its budget; layers that share their scores share it.
    """
    num_layers, num_rows = kept.shape[0], scores.values.shape[0]
    shared = -(-num_layers // num_rows)
    keys = torch.empty(kept.shape, dtype=torch.int16, device=kept.device)
    for row in range(num_rows):  # layer by layer: the intermediate numbers are larger
        first = row * shared
        make = _by_score if comparable else _by_rank
        keys[first : first + shared] = make(scores.values[row], kept[first])
    keys[..., : scores.num_first] = PINNED
    last = torch.arange(PINNED - scores.num_last, PINNED, dtype=torch.int16, device=keys.device)
    keys[..., scores.num_tokens - scores.num_last :] = last.clamp_(min=PINNED - NUM_LAST_KEYS)
    return keys


def _by_score(values: Tensor, kept: Tensor) -> Tensor:
    bits = values.half().add_(0.0).view(torch.int16)  # + 0.0: -0.0 becomes 0.0
    # Bits of a float are ordered as integers, but those of negative numbers downwards.
    ordered = torch.where(bits < 0, bits ^ 0x7FFF, bits)
    # One bit less makes room for the half: the sign says whether the policy keeps the entry.
    return ((ordered >> 1) - _HALF) ^ (kept.short() * _SIGN)


def _by_rank(values: Tensor, kept: Tensor) -> Tensor:
    keys = ((order_keys(values) >> 1) - 2**30) ^ (kept.int() * -(2**31))  # what is kept comes first
    order = keys.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(keys.shape[-1], device=keys.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(-1, order, places)
    num_kept = kept.sum(-1, keepdim=True)
    num_others = keys.shape[-1] - num_kept
    first = LARGEST - (ranks * (LARGEST + 1)).div(num_kept.clamp(min=1), rounding_mode="floor")
    rest = -1 - ((ranks - num_kept) * 2**15).div(num_others.clamp(min=1), rounding_mode="floor")
    return torch.where(kept, first, rest).short()
