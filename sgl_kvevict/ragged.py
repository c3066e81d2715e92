"""Ragged index lists: one run of entries per (layer, KV head)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Selection:
    """What a policy keeps of a range of tokens.

    Attributes:
        keep_lens: [num_layers, num_kv_heads], int32, entries kept per run.
        indices: [num_entries], int32, token indices relative to the start of the range, run after run in
            (layer, head) order, ascending within a run.
        num_entries: ``keep_lens.sum()``, known on the host without reading the device.
    """

    keep_lens: Tensor
    indices: Tensor
    num_entries: int


@dataclass(frozen=True, eq=False)
class MergePlan:
    """Which rows each kept entry becomes the weighted sum of; the same weights for keys and values.

    Entry ``e`` of the selection is the sum over ``j`` in ``indptr[e]:indptr[e + 1]`` of ``weights[j]`` times the
    row of token ``indices[j]`` (relative to the range) in ``layers[j]``, ``heads[j]``. Its own row comes first.

    Attributes:
        indptr: [num_entries + 1], int32.
        layers: [num_sources], int32.
        heads: [num_sources], int32.
        indices: [num_sources], int32.
        weights: [num_sources], float32; each entry's weights sum to 1.
    """

    indptr: Tensor
    layers: Tensor
    heads: Tensor
    indices: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class SpanRuns:
    """One compressed span as attention reads it. Immutable; compared and hashed by identity.

    Run ``(l, h)`` is ``head_slots[starts[l, h] : starts[l, h] + lens[l, h]]``.

    Attributes:
        head_slots: [segment_entries], int32, head slots of the whole segment (shared by all spans cut from it).
        starts: [num_layers, num_kv_heads], int32, first entry of each run.
        lens: [num_layers, num_kv_heads], int32, entries of each run; may be 0.
        num_tokens: logical tokens the span stands for.
        is_fitted: its entries have biases, which are added to their scores; those of other spans' head slots are 0.
        positions: [segment_entries], int32, logical position of each entry's token, ascending within a run; None: not
            known, and only layers without a window may read it.
    """

    head_slots: Tensor
    starts: Tensor
    lens: Tensor
    num_tokens: int
    is_fitted: bool = False
    positions: Tensor | None = None
