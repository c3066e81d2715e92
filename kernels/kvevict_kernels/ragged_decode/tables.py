"""What the kernels read, split by how often it changes.

:class:`Tables` change with the batch, :class:`Step` every step, :class:`LayerInputs` every layer.

Spans of a batch are units, one per (span, KV head): a run of head slots, and the rows of all new tokens that read it.
Nothing of a span is copied: a run is an address and a length, and the addresses stay valid as long as the tables live.
All sizes that the host needs are upper bounds from what it knows, so that no length is read back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.ragged_decode.host_lists import (
    CHUNKS,
    ROW_TILES,
    HostLists,
    RunLists,
)
from kvevict_kernels.transfer import to_device


@dataclass(frozen=True, eq=False)
class ClassTables:
    """Work of one class (tile and chunk size), for all layers.

    Attributes:
        row_tile: q rows per tile.
        chunk: KV rows per work item.
        max_items: work items of spans in one layer, at most; 0: no span is in this class.
        work_unit: [bound], int32, (layer, span, KV head) of every work item of spans, layer after layer.
        item_start: [num_layers * num_units], int64, first work item of every unit.
        layer_start: [num_layers + 1], int64, first work item of every layer.
        requests: [n], int32, requests whose suffixes are in this class.
        num_requests: n.
        max_suffix_items: work items of their suffixes, at most.
    """

    row_tile: int
    chunk: int
    max_items: int
    work_unit: Tensor
    item_start: Tensor
    layer_start: Tensor
    requests: Tensor
    num_requests: int
    max_suffix_items: int


@dataclass(frozen=True, eq=False)
class Tables:
    """What a batch reads, until requests come or go or their paths change. Everything but host ints is on the device.

    Attributes:
        paths: spans of every request, root first; held, because the kernels read them by address.
        new_lens: new tokens of every request (host).
        num_layers: layers.
        num_kv_heads: KV heads.
        group_size: q heads per KV head.
        run_address: [num_layers, num_spans, num_kv_heads], int64, address of each run's first head slot.
        run_lens: [num_layers, num_spans, num_kv_heads], int32.
        partial_start: [num_layers, num_spans, num_kv_heads], int64, first partial row of each unit in its layer.
        span_members: [num_spans], int32, new tokens that read each span in the split kernel.
        span_member_start: [num_spans], int32, where they start in ``members``.
        span_chunk: [num_spans], int32, KV rows per work item.
        members: rows of new tokens: of every span's readers, then of every request.
        request_members: [num_requests], int32, where each request's rows start in ``members``.
        new_lens_device: [num_requests], int32.
        waterlines: [num_requests], int32, tokens that the request's path stands for.
        request_chunk: [num_requests], int32, KV rows per work item of the suffix.
        suffix_partial: [num_requests], int64, first partial row of each suffix.
        path_start: [num_requests + 1], int32, each request's part of the two below.
        path_span: int32, spans.
        path_member: int32, place of the request's first new token among the span's members.
        merge_request: [num_merged], int32, request of each new token that the split kernel attends for.
        merge_token: [num_merged], int32, its place among the request's new tokens.
        tile_request: [num_tiles], int32, tiles of requests that ``ragged_extend`` attends for.
        tile_index: [num_tiles], int32, place among the request's tiles.
        classes: work of the split kernel.
        num_partials: partial rows that one layer needs, at most.
    """

    paths: tuple[tuple[RunLists, ...], ...]
    new_lens: tuple[int, ...]
    num_layers: int
    num_kv_heads: int
    group_size: int
    run_address: Tensor
    run_lens: Tensor
    partial_start: Tensor
    span_members: Tensor
    span_member_start: Tensor
    span_chunk: Tensor
    members: Tensor
    request_members: Tensor
    new_lens_device: Tensor
    waterlines: Tensor
    request_chunk: Tensor
    suffix_partial: Tensor
    path_start: Tensor
    path_span: Tensor
    path_member: Tensor
    merge_request: Tensor
    merge_token: Tensor
    tile_request: Tensor
    tile_index: Tensor
    classes: tuple[ClassTables, ...]
    num_partials: int

    @property
    def num_spans(self) -> int:
        """Different spans that the batch reads."""
        return self.span_members.numel()

    @property
    def num_new(self) -> int:
        """New tokens of all requests."""
        return sum(self.new_lens)


@dataclass(frozen=True, eq=False)
class Step:
    """Where the suffixes are now.

    Attributes:
        req_to_token: [num_rows, max_context_len], int32, token slots.
        pool_rows: [num_requests], int64, each request's row of it.
        seq_lens: [num_requests], int32, logical tokens with the new ones.
        work: per class, [max_suffix_items] int32, place in ``ClassTables.requests`` of each work item.
        work_start: per class, [num_requests + 1], int32, first work item of each of them.
    """

    req_to_token: Tensor
    pool_rows: Tensor
    seq_lens: Tensor
    work: tuple[Tensor, ...]
    work_start: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """What one layer attends with.

    Attributes:
        layer: layer index.
        q: [num_new_tokens, num_qo_heads, head_dim], bfloat16, float16 or float32, request after request.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], dtype of ``q``.
        v_arena: like ``k_arena``.
        sm_scale: softmax scale.
    """

    layer: int
    q: Tensor
    k_arena: Tensor
    v_arena: Tensor
    sm_scale: float


def build_tables(
    paths: Sequence[Sequence[RunLists]],
    new_lens: Sequence[int],
    *,
    num_layers: int,
    num_kv_heads: int,
    group_size: int,
    device: torch.device,
) -> Tables:
    """Lay out a batch: no host synchronisation, one copy to the device.

    Args:
        paths: per request, the spans that it reads, root first.
        new_lens: per request, new tokens, >= 1.
        num_layers: layers.
        num_kv_heads: KV heads.
        group_size: q heads per KV head.
        device: where the spans are.
    """
    host = HostLists(paths, new_lens, num_kv_heads, group_size)
    spans = host.spans
    sent = _send(host.lists(), device)
    shape = (num_layers, len(spans), num_kv_heads)
    if spans:
        run_lens = torch.stack([span.lens for span in spans], dim=1).contiguous()
        starts = torch.stack([span.starts for span in spans], dim=1)
        run_address = sent["span_address"].view(1, -1, 1) + 4 * starts.long()
    else:
        run_lens = torch.zeros(shape, dtype=torch.int32, device=device)
        run_address = torch.zeros(shape, dtype=torch.int64, device=device)
    int32 = {name: x.int() for name, x in sent.items() if name not in ("span_address", "suffix_partial")}
    chunks = (run_lens + int32["span_chunk"].view(1, -1, 1) - 1) // int32["span_chunk"].view(1, -1, 1)
    partials = chunks.long() * (int32["span_members"] * group_size).view(1, -1, 1)
    flat = partials.view(num_layers, -1)
    return Tables(
        paths=tuple(tuple(path) for path in paths),
        new_lens=tuple(new_lens),
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        run_address=run_address,
        run_lens=run_lens,
        partial_start=(flat.cumsum(1) - flat).view(shape),
        suffix_partial=sent["suffix_partial"].clone(),  # aligned whatever is beside it: one compiled variant
        classes=tuple(_class_tables(host, which, chunks, int32, device) for which in range(len(ROW_TILES))),
        num_partials=host.num_partials,
        **{name: int32[name] for name in _INT32_FIELDS},
    )


def build_step(
    tables: Tables, req_to_token: Tensor, pool_rows: Tensor, seq_lens: Tensor, previous: Step | None = None
) -> Step:
    """Put together what changes every step; the work lists are filled in by the split kernel's launcher."""
    if previous is not None:
        return Step(req_to_token, pool_rows, seq_lens, previous.work, previous.work_start)
    device = seq_lens.device
    return Step(
        req_to_token=req_to_token,
        pool_rows=pool_rows,
        seq_lens=seq_lens,
        work=tuple(
            torch.empty(max(1, class_tables.max_suffix_items), dtype=torch.int32, device=device)
            for class_tables in tables.classes
        ),
        work_start=tuple(
            torch.empty(class_tables.num_requests + 1, dtype=torch.int32, device=device)
            for class_tables in tables.classes
        ),
    )


_INT32_FIELDS = (
    "span_members",
    "span_member_start",
    "span_chunk",
    "members",
    "request_members",
    "new_lens_device",
    "waterlines",
    "request_chunk",
    "path_start",
    "path_span",
    "path_member",
    "merge_request",
    "merge_token",
    "tile_request",
    "tile_index",
)


def _class_tables(
    host: HostLists, which: int, chunks: Tensor, sent: dict[str, Tensor], device: torch.device
) -> ClassTables:
    """Number the work items of one class: units in (layer, span, KV head) order, chunks, then tiles of q rows."""
    num_layers = chunks.shape[0]
    bound, in_one = host.max_items(which, num_layers)
    row_tile = ROW_TILES[which]
    tiles = (sent["span_members"] * host.group_size + row_tile - 1) // row_tile
    tiles = torch.where(sent["span_class"] == which, tiles, 0)
    items = (chunks * tiles.view(1, -1, 1)).view(-1).long()
    ends = items.cumsum(0)
    layer_start = torch.zeros(num_layers + 1, dtype=torch.int64, device=device)
    if ends.numel():
        layer_start[1:] = ends.view(num_layers, -1)[:, -1]
    return ClassTables(
        row_tile=row_tile,
        chunk=CHUNKS[which],
        max_items=in_one,
        work_unit=torch.searchsorted(ends, torch.arange(bound, device=device), right=True).int(),
        item_start=ends - items,
        layer_start=layer_start,
        requests=sent[f"requests_{which}"],
        num_requests=len(host.requests_of(which)),
        max_suffix_items=host.max_suffix_items(which),
    )


def _send(lists: dict[str, list[int]], device: torch.device) -> dict[str, Tensor]:
    """Copy lists to the device in one piece, without waiting for it."""
    flat = torch.tensor([x for values in lists.values() for x in values], dtype=torch.int64)
    pieces = torch.split(to_device(flat, device), [len(values) for values in lists.values()])
    return dict(zip(lists, pieces, strict=True))
