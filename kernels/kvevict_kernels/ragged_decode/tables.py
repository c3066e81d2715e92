"""The kernels' inputs, split by how often they change.

:class:`Tables` change with the batch, :class:`Step` every step, :class:`LayerInputs` every layer.

Spans of a batch are units, one per (span, KV head): a run of head slots, and the rows of all new tokens that read it.
Nothing of a span is copied: a run is an address and a length, and the addresses stay valid as long as the tables live.
All sizes that the host needs are upper bounds computed on the host, so that no length is read back from the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.ragged_decode.host_lists import NUM_CLASSES, HostLists, Sizes
from kvevict_kernels.span_runs import SpanRuns
from kvevict_kernels.transfer import to_device


@dataclass(frozen=True, eq=False)
class ClassTables:
    """Work of one class of q rows, for all layers.

    Attributes:
        max_items: work items of spans in one layer, at most; 0: no span is in this class.
        work_unit: [num_layers, max_items], int32, (span, KV head) of every work item of spans.
        item_start: [num_layers, num_units], int32, first work item of every unit in its layer.
        item_count: [num_layers], int32, work items of spans.
        requests: [n], int32, requests whose suffixes are in this class.
        num_requests: n.
        max_suffix_items: work items of their suffixes, at most.
    """

    max_items: int
    work_unit: Tensor
    item_start: Tensor
    item_count: Tensor
    requests: Tensor
    num_requests: int
    max_suffix_items: int


@dataclass(frozen=True, eq=False)
class Tables:
    """Lists of a batch, until requests come or go or their paths change. Everything but host ints is on the device.

    Attributes:
        paths: spans of every request, root first; held, because the kernels read them by address.
        new_lens: new tokens of every request (host).
        sizes: shared by all batches.
        span_address: [num_spans], int64, addresses of each span's head slots, and likewise:
        span_starts: of its starts.
        span_lens: of its lengths.
        span_positions: [num_spans], int64, bytes from an entry's head slot to its position, where layers have windows.
        run_address: [num_layers, num_spans, num_kv_heads], int64, address of each run's first head slot.
        run_lens: [num_layers, num_spans, num_kv_heads], int32.
        partial_start: [num_layers, num_spans, num_kv_heads], int64, first partial row of each unit in its layer.
        span_members: [num_spans], int32, new tokens that read each span in the split kernel.
        span_member_start: [num_spans], int32, where they start in ``members``.
        span_class: [num_spans], int32, row class.
        span_chunk: [num_spans], int32, entries per work item.
        span_cap: [num_spans], int32, chunks per run, at most: a longer run has longer chunks.
        members: rows of new tokens: of every span's readers, then of every request.
        member_request: [of the first part of ``members``], int32, request of each; empty if no layer has a window.
        row_ends: [num_requests], int32, row behind each request's last new token; likewise.
        request_members: [num_requests], int32, where each request's rows start in ``members``.
        new_lens_device: [num_requests], int32.
        waterlines: [num_requests], int32, tokens that are compressed into the request's path.
        request_chunk: [num_requests], int32, tokens per work item of the suffix, at least.
        num_splits: [num_requests], int32, parts of the keys in ``ragged_extend``.
        suffix_partial: [num_requests], int64, first partial row of each suffix.
        extend_partial: [num_requests], int64, first partial row in ``ragged_extend``.
        path_start: [num_requests + 1], int32, each request's part of the two below.
        path_span: int32, spans.
        path_member: int32, place of the request's first new token among the span's members.
        merge_request: [num_merged], int32, request of each new token that the split kernel attends for.
        merge_token: [num_merged], int32, its place among the request's new tokens.
        tile_request: [num_tiles], int32, programs per KV head of ``ragged_extend``: request,
        tile_index: place among the request's tiles,
        tile_split: part of the keys.
        has_splits: whether any of them has several parts.
        classes: work of the split kernel.
        num_partials: partial rows that one layer needs, at most.
    """

    paths: tuple[tuple[SpanRuns, ...], ...]
    new_lens: tuple[int, ...]
    sizes: Sizes
    span_address: Tensor
    span_starts: Tensor
    span_lens: Tensor
    span_positions: Tensor
    run_address: Tensor
    run_lens: Tensor
    partial_start: Tensor
    span_members: Tensor
    span_member_start: Tensor
    span_class: Tensor
    span_chunk: Tensor
    span_cap: Tensor
    members: Tensor
    member_request: Tensor
    row_ends: Tensor
    request_members: Tensor
    new_lens_device: Tensor
    waterlines: Tensor
    request_chunk: Tensor
    num_splits: Tensor
    suffix_partial: Tensor
    extend_partial: Tensor
    path_start: Tensor
    path_span: Tensor
    path_member: Tensor
    merge_request: Tensor
    merge_token: Tensor
    tile_request: Tensor
    tile_index: Tensor
    tile_split: Tensor
    has_splits: bool
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
    """Inputs of one layer.

    Attributes:
        layer: layer index.
        q: [num_new_tokens, num_qo_heads, head_dim], bfloat16, float16 or float32, request after request; tokens may
            lie apart (a slice of a fused projection), heads of one token lie together.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], dtype of ``q`` or float8_e4m3fn; the caller has
            checked all three with :func:`kvevict_kernels.checks.check_arenas`, once.
        v_arena: like ``k_arena``.
        sm_scale: factor of the products of queries and stored keys: softmax scale, times the layer's scale of keys.
        v_scale: FP8 scale of the layer's values; 1.0 for other dtypes.
        biases: [num_layers, num_token_slots, num_kv_heads], float32, added to the scores of entries of spans; None:
            nothing is.
        window: tokens that a query of the layer sees at most, itself included; 0: all.
        sink_logits: [num_qo_heads], of any floating dtype: one more score of every row, with value 0; None: none.
    """

    layer: int
    q: Tensor
    k_arena: Tensor
    v_arena: Tensor
    sm_scale: float
    v_scale: float = 1.0
    biases: Tensor | None = None
    window: int = 0
    sink_logits: Tensor | None = None

    @property
    def reads_more(self) -> bool:
        """Whether kernels read biases or positions beside K and V."""
        return self.biases is not None or self.window > 0


def build_tables(
    paths: Sequence[Sequence[SpanRuns]],
    new_lens: Sequence[int],
    suffix_bounds: Sequence[int],
    *,
    sizes: Sizes,
    device: torch.device,
    elsewhere: Collection[int],
) -> Tables:
    """Send the host's lists in one copy, without waiting for it; tables that are computed on the device stay empty.

    Args:
        paths: per request, the spans that it reads, root first.
        new_lens: per request, new tokens, >= 1.
        suffix_bounds: per request, tokens behind its path, at most.
        sizes: shared by all batches.
        device: where the spans are.
        elsewhere: requests that ``ragged_extend`` leaves out.
    """
    host = HostLists(paths, new_lens, suffix_bounds, sizes, elsewhere)
    sent = _send(host.addresses(), host.lists(), device)
    shape = (sizes.num_layers, len(host.spans), sizes.num_kv_heads)
    return Tables(
        paths=tuple(tuple(path) for path in paths),
        new_lens=tuple(new_lens),
        sizes=sizes,
        run_address=torch.empty(shape, dtype=torch.int64, device=device),
        run_lens=torch.empty(shape, dtype=torch.int32, device=device),
        partial_start=torch.empty(shape, dtype=torch.int64, device=device),
        has_splits=any(splits > 1 for splits in host.num_splits),
        classes=tuple(_class_tables(host, which, sent.pop(f"requests_{which}")) for which in range(NUM_CLASSES)),
        num_partials=host.num_partials,
        **sent,
    )


def build_step(
    tables: Tables, req_to_token: Tensor, pool_rows: Tensor, seq_lens: Tensor, previous: Step | None = None
) -> Step:
    """Put together a step; the split kernel's launcher fills in the work lists."""
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


def _class_tables(host: HostLists, which: int, requests: Tensor) -> ClassTables:
    num_layers, device = host.sizes.num_layers, requests.device
    max_items = host.max_items(which)
    num_units = len(host.spans) * host.sizes.num_kv_heads
    return ClassTables(
        max_items=max_items,
        work_unit=torch.empty(num_layers, max_items, dtype=torch.int32, device=device),
        item_start=torch.empty(num_layers, num_units, dtype=torch.int32, device=device),
        item_count=torch.empty(num_layers, dtype=torch.int32, device=device),
        requests=requests,
        num_requests=len(host.requests_of(which)),
        max_suffix_items=host.max_suffix_items(which),
    )


def _send(wide: dict[str, list[int]], narrow: dict[str, list[int]], device: torch.device) -> dict[str, Tensor]:
    """Copy lists to the device in one piece: 64-bit ones, then 32-bit ones."""
    words = torch.tensor([x for values in wide.values() for x in values], dtype=torch.int64)
    halves = torch.tensor([x for values in narrow.values() for x in values], dtype=torch.int32)
    flat = to_device(torch.cat([words.view(torch.int32), halves]), device)
    first = 2 * words.numel()
    pieces = torch.split(flat[:first].view(torch.int64), [len(values) for values in wide.values()])
    small = torch.split(flat[first:], [len(values) for values in narrow.values()])
    return dict(zip([*wide, *narrow], [*pieces, *small], strict=True))
