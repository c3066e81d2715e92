"""Ragged index lists: one run of entries per (layer, KV head)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MergePlan:
    """Source rows and weights whose weighted sum replaces each kept entry, the same for keys and values.

    Kept entry ``e`` is the sum over ``j`` in ``indptr[e]:indptr[e + 1]`` of ``weights[j]`` times the row of the token
    ``indices[j]`` (relative to the start of the range) in ``layers[j]``, ``heads[j]``. Its own row comes first.

    Attributes:
        indptr: [num_entries + 1], int32.
        layers: [num_sources], int32, like ``heads`` and ``indices``.
        weights: [num_sources], float32; each entry's weights sum to 1.
    """

    indptr: Tensor
    layers: Tensor
    heads: Tensor
    indices: Tensor
    weights: Tensor


def run_entries(starts: Tensor, lens: Tensor, count: int) -> Tensor:
    """[count], int64: the indices ``starts[r] .. starts[r] + lens[r]`` of all runs, one run after the other.

    ``starts`` and ``lens`` are integers of the same shape; ``count`` is ``lens.sum()``.
    """
    starts, lens = starts.flatten().long(), lens.flatten().long()
    # Each run is a shift of consecutive numbers, so a loop over runs is not needed, and the given size saves a host
    # sync.
    shift = torch.repeat_interleave(starts - (lens.cumsum(0) - lens), lens, output_size=count)
    return torch.arange(count, device=lens.device) + shift


def runs_of(lens: Tensor, count: int) -> Tensor:
    """[count], int64: the run of each entry; ``lens``, int, of any shape, has the entries of each run."""
    lens = lens.flatten().long()
    return torch.repeat_interleave(torch.arange(lens.numel(), device=lens.device), lens, output_size=count)
