"""Ragged index lists: one run of entries per (layer, KV head)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Selection:
    """Kept entries of a range of tokens, or of what was kept of it before.

    Attributes:
        keep_lens: [num_layers, num_kv_heads], int32, entries kept per run.
        indices: [num_entries], int32, run after run in (layer, head) order, ascending within a run: token indices
            relative to the start of the range, or numbers of the entries of the run that are there.
        num_entries: ``keep_lens.sum()``, known on the host without reading the device.
    """

    keep_lens: Tensor
    indices: Tensor
    num_entries: int


@dataclass(frozen=True, eq=False)
class MergePlan:
    """Source rows and weights whose weighted sum replaces each kept entry, the same for keys and values.

    Entry ``e`` of the selection is the sum over ``j`` in ``indptr[e]:indptr[e + 1]`` of ``weights[j]`` times the
    row ``indices[j]`` (as in :class:`Selection`) of ``layers[j]``, ``heads[j]``. Its own row comes first.

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
