"""What FlashInfer's paged prefill reads: index lists, built with torch alone.

Spans: pages of one head slot over the whole arena, one KV head, one row per (group of sharers, KV head, part), the
group's queries stacked. Without split-KV FlashInfer's plan depends on the number of queries per row only, so one plan
serves all layers, and a long run is cut into parts here. Suffixes: the usual pages of one token slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.transfer import to_device
from sgl_kvevict.attention.batch import AttentionBatch, Path
from sgl_kvevict.attention.flashinfer.span_groups import SpanGroup, group_spans, join_runs, merge_table
from sgl_kvevict.geometry import KVGeometry

PART_ENTRIES = 1024
"""A run is cut into as many equal parts as its span's average run holds this many entries."""
MAX_PARTS = 16
MAX_SPLIT_ROWS = 64
"""Runs with more stacked q rows are not cut: there is enough work, and every part copies the queries."""


@dataclass(frozen=True)
class SpanLists:
    """Spans of a batch, until requests come or go or their paths change.

    Rows are in (group, KV head, part) order; a row's queries are its group's new tokens.

    Attributes:
        qo_indptr: [num_rows + 1], int32, on the host.
        kv_indptr: [num_layers, num_rows + 1], int32, places in ``kv_indices``.
        kv_indices: [num_entries], int32, head slots.
        q_rows: [qo_indptr[-1]], int64, (new token, KV head) of each stacked query.
        merge_table: [num_new * num_kv_heads, width], int64, stacked queries that belong to each (token, KV head).
        merge_bias: [num_new * num_kv_heads, width, 1], float32, -inf where the table only fills up.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    q_rows: Tensor
    merge_table: Tensor
    merge_bias: Tensor

    @property
    def num_rows(self) -> int:
        """Rows of FlashInfer's batch."""
        return self.qo_indptr.numel() - 1


@dataclass(frozen=True)
class SuffixLists:
    """Suffixes of one forward, the same for all layers; ``indptr`` on the host.

    Attributes:
        qo_indptr: [num_requests + 1], int32.
        kv_indptr: [num_requests + 1], int32.
        kv_indices: [num_tokens], int32, token slots, on the device.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor


def build_span_lists(
    paths: Sequence[Path], new_lens: Sequence[int], geometry: KVGeometry, device: torch.device
) -> SpanLists | None:
    """Lay out the spans of a batch; None if it reads none.

    Args:
        paths: per request, the spans on its path.
        new_lens: per request, new tokens.
        geometry: sizes.
        device: where the spans are.

    Cost: copies 4 bytes per entry read; one host sync, when requests come or go or their paths change.
    """
    groups = group_spans(paths)
    if not groups:
        return None
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
    bias = torch.where(torch.arange(table.shape[1]) < counts[:, None], 0.0, float("-inf"))
    lens, head_slots = join_runs(groups, geometry)
    return SpanLists(
        qo_indptr=_indptr(num_queries),
        kv_indptr=_cut_runs(lens, parts, geometry),
        kv_indices=head_slots,
        q_rows=owners.to(device),
        merge_table=table.to(device),
        merge_bias=bias[..., None].to(device),
    )


def build_suffix_lists(batch: AttentionBatch, window: int = 0) -> SuffixLists:
    """List the uncompressed token slots of every request; no host sync.

    Args:
        batch: the requests of a forward.
        window: tokens that a query sees, itself included; those that no new token sees are left out. 0: all.
    """
    device = batch.req_to_token.device
    firsts = batch.waterlines
    if window:
        ends = zip(firsts, batch.seq_lens, batch.new_lens, strict=True)
        firsts = [max(waterline, end - new - window + 1) for waterline, end, new in ends]
    lens = [end - first for first, end in zip(firsts, batch.seq_lens, strict=True)]
    kv_indptr = _indptr(lens)
    total = int(kv_indptr[-1])
    host = torch.tensor([lens, firsts, kv_indptr[:-1].tolist()])
    device_lens, device_firsts, starts = to_device(host, device)
    row_start = batch.req_pool_indices.long() * batch.req_to_token.stride(0) + device_firsts - starts
    places = torch.repeat_interleave(row_start, device_lens, output_size=total) + torch.arange(total, device=device)
    return SuffixLists(
        qo_indptr=_indptr(batch.new_lens),
        kv_indptr=kv_indptr,
        kv_indices=batch.req_to_token.reshape(-1).index_select(0, places),
    )


def merge_base2(
    lists: SpanLists, span_out: Tensor, span_lse: Tensor, own_out: Tensor, own_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine the parts of spans with the suffix in float32, with one rounding.

    Args:
        lists: which parts belong to which (token, KV head).
        span_out: [num_stacked_queries, group_size, head_dim].
        span_lse: [num_stacked_queries, group_size], float32, base 2; -inf for an empty row.
        own_out: [num_new, num_qo_heads, head_dim].
        own_lse: [num_new, num_qo_heads], float32, base 2, finite: a token sees itself.

    Returns:
        out like ``own_out``, and lse [num_new, num_qo_heads], float32, base 2.
    """
    group, head_dim = span_out.shape[1:]
    num_rows, width = lists.merge_table.shape
    rows = lists.merge_table.view(-1)
    out = span_out.index_select(0, rows).view(num_rows, width, group, head_dim).float()
    lse = span_lse.index_select(0, rows).view(num_rows, width, group) + lists.merge_bias
    out = torch.cat([out, own_out.view(num_rows, 1, group, head_dim).float()], dim=1)
    lse = torch.cat([lse, own_lse.view(num_rows, 1, group)], dim=1)
    top = lse.amax(1, keepdim=True)
    weight = torch.exp2(lse - top)
    total = weight.sum(1)
    merged = (out * weight[..., None]).sum(1) / total[..., None]
    return merged.view(own_out.shape).to(own_out.dtype), (top.squeeze(1) + torch.log2(total)).view(own_lse.shape)


def _num_parts(group: SpanGroup, num_rows: int, geometry: KVGeometry) -> int:
    """Parts of each of the group's runs: depends on its spans alone, and on whether its queries fill a tile."""
    if num_rows > MAX_SPLIT_ROWS:
        return 1
    average = sum(span.head_slots.numel() for span in group.spans) // geometry.num_runs
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
    begin = (ends - lens)[:, unit] + lens[:, unit] * part // count
    return torch.cat([begin, ends[:, -1:]], dim=1).int()


def _indptr(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()
