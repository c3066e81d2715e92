"""Spans that the same requests read, put together, so that they are read once for all of them.

Nothing here changes from step to step: it is done when requests come or go or their paths change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention.batch import Path
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.ragged import run_entries


@dataclass(frozen=True)
class SpanGroup:
    """Spans that exactly the same requests of a batch read.

    Attributes:
        members: the requests' places in the batch.
        spans: the spans; order does not matter, they are read without a mask.
    """

    members: tuple[int, ...]
    spans: tuple[SpanRuns, ...]


@dataclass(frozen=True)
class JoinedRuns:
    """Runs of several spans, joined where the same readers read them.

    A *unit* is one KV head of the readers: of a group of requests, or of one request.

    Attributes:
        starts: [num_layers, num_units], int64, where each unit starts in ``head_slots``.
        lens: [num_layers, num_units], int64; may be 0.
        head_slots: [num_entries], int32.
        biases: [num_entries], float32, added to their scores; None: no span is fitted.
    """

    starts: Tensor
    lens: Tensor
    head_slots: Tensor
    biases: Tensor | None


def group_spans(paths: Sequence[Path]) -> list[SpanGroup]:
    """Put together the spans that the same requests read, wherever on their paths they are."""
    readers: dict[SpanRuns, list[int]] = {}
    for request, path in enumerate(paths):
        for span in path:
            readers.setdefault(span, []).append(request)
    groups: dict[tuple[int, ...], list[SpanRuns]] = {}
    for span, members in readers.items():
        groups.setdefault(tuple(members), []).append(span)
    return [SpanGroup(members, tuple(spans)) for members, spans in groups.items()]


def join_runs(groups: Sequence[SpanGroup], geometry: KVGeometry, biases: Tensor | None = None) -> JoinedRuns:
    """Copy the runs of each (layer, group, KV head) one after the other; reads one total back from a device.

    Args:
        groups: whose runs; units are in (group, KV head) order.
        geometry: sizes.
        biases: [num_layers, num_token_slots, num_kv_heads], float32, of head slots; None: no span is fitted.
    """
    num_layers = geometry.num_layers
    pool, offsets = _pool_head_slots([span for group in groups for span in group.spans])
    starts, lens, unit_lens = [], [], []
    for group in groups:
        group_lens = torch.stack([span.lens for span in group.spans], dim=2).long()
        begins = [span.starts.long() + offsets[id(span.head_slots)] for span in group.spans]
        starts.append(torch.stack(begins, dim=2).view(num_layers, -1))
        lens.append(group_lens.view(num_layers, -1))
        unit_lens.append(group_lens.sum(2))
    head_slots = _gather_runs(pool, torch.cat(starts, dim=1).view(-1), torch.cat(lens, dim=1).view(-1))
    joined = torch.cat(unit_lens, dim=1)
    is_fitted = any(span.is_fitted for group in groups for span in group.spans)
    return JoinedRuns(
        starts=(joined.view(-1).cumsum(0) - joined.view(-1)).view(joined.shape),
        lens=joined,
        head_slots=head_slots,
        biases=biases.view(-1).index_select(0, head_slots) if biases is not None and is_fitted else None,
    )


def _pool_head_slots(spans: Sequence[SpanRuns]) -> tuple[Tensor, dict[int, int]]:
    """Concatenate the distinct segments; returns where each starts, by the identity of its tensor."""
    segments = {id(span.head_slots): span.head_slots for span in spans}
    offsets, total = {}, 0
    for key, head_slots in segments.items():
        offsets[key] = total
        total += head_slots.numel()
    return torch.cat(list(segments.values())), offsets


def _gather_runs(pool: Tensor, starts: Tensor, lens: Tensor) -> Tensor:
    """Concatenate ``pool[start : start + len]`` of all runs."""
    return pool.index_select(0, run_entries(starts, lens, int(lens.sum())))
