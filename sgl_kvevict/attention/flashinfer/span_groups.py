"""Groups of spans that the same requests read, so that FlashInfer reads them once per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.span_runs import SpanReaders, SpanRuns
from sgl_kvevict.attention.batch import Path
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.ragged import run_entries


@dataclass(frozen=True)
class SpanGroup:
    """Spans that exactly the same requests of a batch read."""

    members: tuple[int, ...]  # indices of the requests in the batch
    spans: tuple[SpanRuns, ...]  # in any order: they are read without a mask


def group_spans(paths: Sequence[Path]) -> list[SpanGroup]:
    """Group the spans of a batch by the requests that read them, at any depth of their paths."""
    readers = SpanReaders(paths, [range(i, i + 1) for i in range(len(paths))])
    groups: dict[tuple[int, ...], list[SpanRuns]] = {}
    for span, members in zip(readers.spans, readers.rows, strict=True):
        groups.setdefault(tuple(members), []).append(span)
    return [SpanGroup(members, tuple(spans)) for members, spans in groups.items()]


def join_runs(groups: Sequence[SpanGroup], geometry: KVGeometry) -> tuple[Tensor, Tensor]:
    """Concatenate the runs of each (layer, group, KV head); reads one total back from a device.

    Returns:
        lens [num_layers, num_groups * num_kv_heads], int64, entries of each joined run, which may be 0, and head slots
        [num_entries], int32, in the order of ``lens``.
    """
    # Distinct segments: several spans may be cut from one.
    segments = {id(span.rows): span.rows for group in groups for span in group.spans}
    offsets, total = {}, 0
    for key, head_slots in segments.items():
        offsets[key] = total
        total += head_slots.numel()
    starts, lens, joined = [], [], []
    for group in groups:
        group_lens = torch.stack([span.lens for span in group.spans], dim=2).long()
        begins = [span.starts.long() + offsets[id(span.rows)] for span in group.spans]
        starts.append(torch.stack(begins, dim=2).view(geometry.num_layers, -1))
        lens.append(group_lens.view(geometry.num_layers, -1))
        joined.append(group_lens.sum(2))
    run_lens = torch.cat(lens, dim=1)
    entries = run_entries(torch.cat(starts, dim=1), run_lens, int(run_lens.sum()))
    return torch.cat(joined, dim=1), torch.cat(list(segments.values())).index_select(0, entries)


def merge_table(owners: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """List the partial results of each of ``num_rows`` rows; ``owners`` [num_partials] is each partial result's row.

    Returns:
        table [num_rows, width], int64, partial results in ascending order; a row with fewer repeats its first one, and
        a row without any has 0. counts [num_rows], int64, partial results per row.
    """
    order = torch.argsort(owners, stable=True)
    counts = torch.bincount(owners, minlength=num_rows)
    column = torch.arange(int(counts.max()) if num_rows else 0)
    entry = (counts.cumsum(0) - counts)[:, None] + torch.where(column < counts[:, None], column, 0)
    if order.numel() == 0:
        return torch.zeros_like(entry), counts
    return torch.where(counts[:, None] > 0, order[torch.clamp(entry, max=order.numel() - 1)], 0), counts
