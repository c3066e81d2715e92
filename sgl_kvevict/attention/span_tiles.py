"""The compressed part of a decode step: which q rows read which runs, for all layers, as tiles.

Spans that the same requests read are joined per KV head into one unit, which is read once for all of them. None of
it changes from step to step, so it is built once per composition of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.ragged_attention.tiles import Tiles, build_tiles
from sgl_kvevict.attention.batch import Path
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.ragged import SpanRuns

SHARER_CLASSES = (1, 4, 16, 64)
"""Units with up to so many requests are padded to the same number of q rows; the last class is open."""


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
class UnitLists:
    """The runs of several groups, joined per (layer, group, KV head).

    Attributes:
        q_table: [num_units, rows], int64, q rows (request * num_qo_heads + q head), filled up with -1.
        kv_starts: [num_units], int64, where each unit starts in ``kv_indices``.
        kv_lens: [num_units], int64.
        kv_indices: [num_entries], int32, head slots.
        kv_biases: [num_entries], float32, added to their scores; None: no span is fitted.
    """

    q_table: Tensor
    kv_starts: Tensor
    kv_lens: Tensor
    kv_indices: Tensor
    kv_biases: Tensor | None

    def tiles(self, num_layers: int, block: int, lanes: int) -> list[Tiles]:
        """Cut into blocks; the tiles of each layer."""
        tiles, counts = build_tiles(
            self.q_table,
            self.kv_starts,
            self.kv_lens,
            self.kv_indices,
            block=block,
            lanes=lanes,
            num_groups=num_layers,
            biases=self.kv_biases,
        )
        ends = torch.tensor(counts).cumsum(0).tolist()
        return [tiles[end - count : end] for end, count in zip(ends, counts, strict=True)]


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


def sharer_class(num_members: int) -> int:
    """Index into ``SHARER_CLASSES``; 0 is for spans that one request reads alone."""
    return sum(num_members > limit for limit in SHARER_CLASSES[:-1])


def join_units(groups: Sequence[SpanGroup], geometry: KVGeometry, biases: Tensor | None = None) -> UnitLists:
    """List the runs of groups unit by unit, in (layer, group, KV head) order.

    Args:
        groups: whose runs.
        geometry: sizes.
        biases: [num_layers, num_token_slots, num_kv_heads], float32, of head slots; None: no span is fitted.
    """
    kv_lens, kv_indices = join_runs(groups, geometry)
    is_fitted = any(span.is_fitted for group in groups for span in group.spans)
    return UnitLists(
        q_table=_q_table(groups, geometry).repeat(geometry.num_layers, 1),
        kv_starts=kv_lens.cumsum(0) - kv_lens,
        kv_lens=kv_lens,
        kv_indices=kv_indices,
        kv_biases=biases.view(-1).index_select(0, kv_indices) if biases is not None and is_fitted else None,
    )


def join_runs(groups: Sequence[SpanGroup], geometry: KVGeometry) -> tuple[Tensor, Tensor]:
    """Copy the runs of each (layer, group, KV head) one after the other; reads one total back from a device.

    Returns:
        lengths [num_layers * num_groups * num_kv_heads], int64, and head slots [their sum], int32.
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
    kv_indices = _gather_runs(pool, torch.cat(starts, dim=1).view(-1), torch.cat(lens, dim=1).view(-1))
    return torch.cat(unit_lens, dim=1).view(-1), kv_indices


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
    shift = (starts - (lens.cumsum(0) - lens)).int()
    total = int(lens.sum())
    places = torch.repeat_interleave(shift, lens, output_size=total).add_(
        torch.arange(total, dtype=torch.int32, device=lens.device)
    )
    return pool.index_select(0, places)


def _q_table(groups: Sequence[SpanGroup], geometry: KVGeometry) -> Tensor:
    """Q rows of each (group, KV head), member by member; [num_groups * num_kv_heads, rows], -1 fills up."""
    widest = max(len(group.members) for group in groups)
    members = torch.full((len(groups), widest), -1)
    for i, group in enumerate(groups):
        members[i, : len(group.members)] = torch.tensor(group.members)
    heads = torch.arange(geometry.num_qo_heads).view(1, geometry.num_kv_heads, 1, geometry.group_size)
    members = members[:, None, :, None]
    rows = torch.where(members >= 0, members * geometry.num_qo_heads + heads, -1)
    return rows.reshape(len(groups) * geometry.num_kv_heads, -1)
