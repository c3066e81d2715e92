"""Index lists for FlashInfer's paged prefill, built with torch alone.

Spans are pages of one head slot over the whole arena, with one KV head. There is a row for each (group of sharers, KV
head, part), with the group's queries stacked. Without split-KV FlashInfer's plan depends only on the number of queries
per row, so one plan serves all layers, and long runs are cut into parts here. Suffixes: the usual pages of one token
slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.span_runs import SpanReaders, SpanRuns
from kvevict_kernels.transfer import to_device
from sgl_kvevict.attention.batch import AttentionBatch, Path
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.ragged import run_entries

PART_ENTRIES = 1024
"""A run is cut into equal parts: its span's average run divided by this, rounded up, at most ``MAX_PARTS``."""
MAX_PARTS = 16
MAX_SPLIT_ROWS = 64
"""Runs with more stacked q rows are not cut: there is enough work, and every part copies the queries."""


@dataclass(frozen=True)
class PageLists:
    """Rows of FlashInfer's batch, each with its queries and its pages."""

    qo_indptr: Tensor  # [num_rows + 1], int32, on the host: starts of the rows' queries
    kv_indptr: Tensor  # [num_rows + 1], int32, on the host: starts in ``kv_indices``
    kv_indices: Tensor  # [num_pages], int32, on the device


@dataclass(frozen=True)
class SpanLists:
    """Spans of a batch, until requests come or go or their paths change.

    Rows are in (group, KV head, part) order; a row's queries are its group's new tokens.
    """

    # head slots; its ``kv_indptr`` is a stand-in with one page per row, so that one plan serves all layers
    pages: PageLists
    kv_indptr: Tensor  # [num_layers, num_rows + 1], int32, on the device: each layer's own bounds
    q_rows: Tensor  # [qo_indptr[-1]], int64, (new token, KV head) of each stacked query
    merge_table: Tensor  # [num_new * num_kv_heads, width], int64, stacked queries of each (token, KV head)
    merge_bias: Tensor  # [num_new * num_kv_heads, width, 1], float32, -inf where the table is padded


def build_span_lists(
    paths: Sequence[Path], new_lens: Sequence[int], geometry: KVGeometry, device: torch.device
) -> SpanLists:
    """Lay out the spans of a batch, in which at least one path is not empty.

    Cost: copies 4 bytes per entry read; one host sync, when requests come or go or their paths change.
    """
    groups = group_spans(paths)
    ends = torch.tensor(new_lens).cumsum(0).tolist()
    tokens = [[row for i in group.members for row in range(ends[i] - new_lens[i], ends[i])] for group in groups]
    parts = [
        _num_parts(group, len(rows) * geometry.group_size, geometry) for group, rows in zip(groups, tokens, strict=True)
    ]
    q_rows, num_queries = [], []
    for rows, count in zip(tokens, parts, strict=True):
        stacked = torch.tensor(rows) * geometry.num_kv_heads + torch.arange(geometry.num_kv_heads)[:, None, None]
        q_rows.append(stacked.expand(-1, count, -1).reshape(-1))
        num_queries += [len(rows)] * (geometry.num_kv_heads * count)
    owners = torch.cat(q_rows)
    table, counts = merge_table(owners, ends[-1] * geometry.num_kv_heads)
    # Tables are padded to one width; -inf takes the padding out of the softmax.
    bias = torch.where(torch.arange(table.shape[1]) < counts[:, None], 0.0, float("-inf"))
    lens, head_slots = join_runs(groups, geometry)
    one_each = torch.arange(len(num_queries) + 1, dtype=torch.int32)
    return SpanLists(
        pages=PageLists(_indptr(num_queries), one_each, head_slots),
        kv_indptr=_cut_runs(lens, parts, geometry),
        q_rows=owners.to(device),
        merge_table=table.to(device),
        merge_bias=bias[..., None].to(device),
    )


def build_suffix_lists(batch: AttentionBatch, window: int = 0) -> PageLists:
    """List the uncompressed token slots of every request; no host sync.

    With a ``window`` (tokens that a query sees, itself included; 0: all) slots that no new token sees are left out.
    """
    device = batch.req_to_token.device
    firsts = batch.compressed_lens
    if window:
        ends = zip(firsts, batch.seq_lens, batch.new_lens, strict=True)
        firsts = [max(compressed_len, end - new - window + 1) for compressed_len, end, new in ends]
    lens = [end - first for first, end in zip(firsts, batch.seq_lens, strict=True)]
    kv_indptr = _indptr(lens)
    total = int(kv_indptr[-1])
    host = torch.tensor([lens, firsts, kv_indptr[:-1].tolist()])
    # Three lists in one copy.
    device_lens, device_firsts, starts = to_device(host, device)
    row_start = batch.req_pool_indices.long() * batch.req_to_token.stride(0) + device_firsts - starts
    # The size of the result is known on the host, so nothing is read back.
    places = torch.repeat_interleave(row_start, device_lens, output_size=total) + torch.arange(total, device=device)
    kv_indices = batch.req_to_token.reshape(-1).index_select(0, places)
    return PageLists(_indptr(batch.new_lens), kv_indptr, kv_indices)


def merge_spans(
    lists: SpanLists, span_out: Tensor, span_lse: Tensor, own_out: Tensor, own_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine the parts of spans with the suffix in float32, with one rounding.

    Args:
        lists: which parts belong to which (token, KV head).
        span_out: [num_stacked_queries, group_size, head_dim].
        span_lse: [num_stacked_queries, group_size], float32, natural; -inf for an empty row.
        own_out: [num_new, num_qo_heads, head_dim].
        own_lse: [num_new, num_qo_heads], float32, natural, finite: a token sees itself.

    Returns:
        out and lse, like ``own_out`` and ``own_lse``.
    """
    group, head_dim = span_out.shape[1:]
    num_rows, width = lists.merge_table.shape
    rows = lists.merge_table.view(-1)
    out = span_out.index_select(0, rows).view(num_rows, width, group, head_dim)
    out = torch.cat([out, own_out.view(num_rows, 1, group, head_dim)], dim=1).float()
    lse = span_lse.index_select(0, rows).view(num_rows, width, group) + lists.merge_bias
    lse = torch.cat([lse, own_lse.view(num_rows, 1, group)], dim=1)
    merged = (out * lse.softmax(1)[..., None]).sum(1)
    return merged.view(own_out.shape).to(own_out.dtype), lse.logsumexp(1).view(own_lse.shape)


def _num_parts(group: SpanGroup, num_rows: int, geometry: KVGeometry) -> int:
    """Parts of each of the group's runs, from its spans and from whether its queries fill a tile."""
    if num_rows > MAX_SPLIT_ROWS:
        return 1
    average = sum(span.rows.numel() for span in group.spans) // geometry.num_runs
    return min(MAX_PARTS, max(1, -(-average // PART_ENTRIES)))


def _cut_runs(lens: Tensor, parts: list[int], geometry: KVGeometry) -> Tensor:
    """Bounds of all parts of all runs, [num_layers, num_rows + 1], int32; ``lens`` as :func:`join_runs` returns it."""
    device = lens.device
    ends = lens.view(-1).cumsum(0).view(lens.shape)
    counts = torch.tensor([count for count in parts for _ in range(geometry.num_kv_heads)])
    unit = torch.arange(counts.numel()).repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    part = torch.arange(unit.numel()) - first[unit]
    unit, part, count = unit.to(device), part.to(device), counts[unit].to(device)
    # Multiplied before it is divided: parts then differ by one entry at most.
    begin = (ends - lens)[:, unit] + lens[:, unit] * part // count
    return torch.cat([begin, ends[:, -1:]], dim=1).int()


def _indptr(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


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
