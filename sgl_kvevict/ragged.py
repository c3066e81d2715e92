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


@dataclass(frozen=True)
class Merge:
    """What each kept entry is made of when a policy merges evicted entries into kept ones.

    Kept entry ``e`` (in the order of ``Selection.indices``) becomes the weighted sum of the uncompressed entries
    ``indptr[e] : indptr[e + 1]``, itself included; K and V share the weights.

    Attributes:
        indptr: [num_entries + 1], int32.
        runs: [num_sources], int64, run of each source as ``layer * num_kv_heads + head``.
        indices: [num_sources], int32, token index of each source relative to the start of the range.
        weights: [num_sources], float32.
        is_causal: every source's token is at or before its kept entry's token.
    """

    indptr: Tensor
    runs: Tensor
    indices: Tensor
    weights: Tensor
    is_causal: bool


@dataclass(frozen=True, eq=False)
class SpanRuns:
    """One compressed span as attention reads it. Immutable; compared and hashed by identity.

    Run ``(l, h)`` is ``head_slots[starts[l, h] : starts[l, h] + lens[l, h]]``.

    Attributes:
        head_slots: [segment_entries], int32, head slots of the whole segment (shared by all spans cut from it).
        starts: [num_layers, num_kv_heads], int32, first entry of each run.
        lens: [num_layers, num_kv_heads], int32, entries of each run; may be 0.
        num_tokens: logical tokens the span stands for.
    """

    head_slots: Tensor
    starts: Tensor
    lens: Tensor
    num_tokens: int
