"""Inputs of the kernels: :class:`Tables` change per batch, :class:`Step` per step, :class:`LayerInputs` per layer.

Spans of a batch are units, one per (span, KV head): a run of head slots, and the rows of all new tokens that read it.
Nothing of a span is copied: a run is an address and a length, valid as long as the tables live. All sizes that the host
needs are upper bounds computed on the host, so no length is read back from the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvevict_kernels.ragged_decode.host_lists import Sizes
from kvevict_kernels.row_codec import RowCoding
from kvevict_kernels.span_runs import SpanRuns

ITEM_WORDS = 4
"""64-bit words of a work item of the split kernel."""


@dataclass(frozen=True, eq=False)
class ClassTables:
    """Work of one class of q rows, for all layers."""

    max_items: int  # work items of spans in one layer, at most; 0: no span is in this class
    items: Tensor  # [num_layers, max_items, ITEM_WORDS], int64, work items of spans (triton_items.py)
    item_start: Tensor  # [num_layers, num_units], int32, first work item of every unit in its layer
    item_count: Tensor  # [num_layers], int32, work items of spans
    requests: Tensor  # [num_requests], int32, requests whose suffixes are in this class
    max_suffix_items: int  # work items of their suffixes, at most


@dataclass(frozen=True, eq=False)
class Tables:
    """Lists of a batch, until requests come or go or their paths change. Everything but host ints is on the device.

    Shapes: S is the number of spans, B of requests. A unit is a (span, KV head).
    """

    # spans of every request, root first; held, because the kernels read them by address
    paths: tuple[tuple[SpanRuns, ...], ...]
    new_lens: tuple[int, ...]  # new tokens of every request (host)
    sizes: Sizes
    span_address: Tensor  # [S], int64, address of each span's head slots
    span_starts: Tensor  # [S], int64, address of its starts
    span_lens: Tensor  # [S], int64, address of its lengths
    span_positions: Tensor  # [S], int64, bytes from an entry's head slot to its position; 0: unknown
    run_address: Tensor  # [num_layers, S, num_kv_heads], int64, address of each run's first head slot
    run_lens: Tensor  # [num_layers, S, num_kv_heads], int32
    run_chunks: Tensor  # [num_layers, S, num_kv_heads], int32, chunks into which each run is cut
    partial_start: Tensor  # [num_layers, S, num_kv_heads], int64, first partial row of each unit in its layer
    span_members: Tensor  # [S], int32, new tokens that read each span in the split kernel
    span_member_start: Tensor  # [S], int32, where they start in ``members``
    span_class: Tensor  # [S], int32, row class
    span_chunk: Tensor  # [S], int32, entries per work item
    span_cap: Tensor  # [S], int32, chunks per run, at most: a longer run has longer chunks
    span_bits: Tensor  # [S], int32, bits of each span's rows
    members: Tensor  # int32, rows of new tokens: of every span's readers, then of every request
    # int32, request of each of the spans' readers in ``members``; empty if no layer has a window
    member_request: Tensor
    row_ends: Tensor  # [B], int32, row after each request's last new token; empty if no layer has a window
    request_members: Tensor  # [B], int32, where each request's rows start in ``members``
    new_lens_device: Tensor  # [B], int32
    compressed_lens: Tensor  # [B], int32, tokens that are compressed into the request's path
    request_chunk: Tensor  # [B], int32, tokens per work item of the suffix, at least
    num_splits: Tensor  # [B], int32, parts of the keys in ``ragged_extend``
    suffix_partial: Tensor  # [B], int64, first partial row of each suffix
    extend_partial: Tensor  # [B], int64, first partial row in ``ragged_extend``
    path_start: Tensor  # [B + 1], int32, each request's part of ``path_span`` and ``path_member``
    path_span: Tensor  # int32, spans
    path_member: Tensor  # int32, place of the request's first new token among the span's members
    merge_request: Tensor  # [num_merged], int32, request of each new token of the split kernel
    merge_token: Tensor  # [num_merged], int32, its place among the request's new tokens
    tile_request: Tensor  # [num_tiles], int32, request of each program of ``ragged_extend`` (per KV head)
    tile_index: Tensor  # [num_tiles], int32, place among the request's tiles
    tile_split: Tensor  # [num_tiles], int32, part of the keys
    tile_share: Tensor  # [num_tiles], int32, place of the part among those of its number of bits
    tile_shares: Tensor  # [num_tiles], int32, parts of that number of bits
    tile_counts: dict[int, int]  # tiles by the bits of their keys, in the order of the lists (host)
    has_splits: bool  # whether a tile has several parts
    classes: tuple[ClassTables, ...]  # work of the split kernel
    num_partials: int  # partial rows of one layer, at most

    @property
    def num_spans(self) -> int:
        """Distinct spans that the batch reads."""
        return self.span_members.numel()

    @property
    def num_new(self) -> int:
        """New tokens of all requests."""
        return sum(self.new_lens)


@dataclass(frozen=True, eq=False)
class Step:
    """Lengths and places of the suffixes in one forward."""

    req_to_token: Tensor  # [num_rows, max_context_len], int32, token slots
    pool_rows: Tensor  # [num_requests], int64, each request's row of ``req_to_token``
    seq_lens: Tensor  # [num_requests], int32, logical tokens including the new ones
    items: tuple[Tensor, ...]  # per class, [max_suffix_items, ITEM_WORDS], int64, work items of the suffixes
    item_start: tuple[Tensor, ...]  # per class, [num_requests + 1], int32, first work item of each request of the class
    # [num_new], int64: bit j is set if the token sees its request's j-th new token; None: those before it
    visible: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """Inputs of one layer."""

    layer: int
    # [num_new_tokens, num_qo_heads, head_dim], bfloat16, float16 or float32, request after request; tokens may be
    # strided (a slice of a fused projection), the heads of one token are contiguous
    q: Tensor
    k_arena: Tensor  # [num_layers, num_token_slots, num_kv_heads, head_dim], dtype of ``q`` or float8_e4m3fn
    v_arena: Tensor  # like ``k_arena``, or the first columns of its rows (latents)
    sm_scale: float  # softmax scale, times the layer's FP8 scale of keys
    v_scale: float = 1.0  # FP8 scale of the layer's values; 1.0 for other dtypes
    window: int = 0  # tokens that a query of the layer sees, itself included; 0: all
    coding: RowCoding | None = None  # by which rows of 4 bits are read; None: no span of any batch has such rows
    sink_logits: Tensor | None = None  # [num_qo_heads], any floating dtype: one more score per row, with value 0

    @property
    def v_head_dim(self) -> int:
        """Width of values and results; less than ``head_dim`` for latents."""
        return self.v_arena.shape[3]

    @property
    def statistics(self) -> Tensor | None:
        """The table by which rows of 4 bits are read."""
        return None if self.coding is None else self.coding.statistics.table

    @property
    def steps(self) -> tuple[Tensor | None, Tensor | None]:
        """Steps of the rows of keys and of values that have 4 bits."""
        return (None, None) if self.coding is None else (self.coding.k_steps, self.coding.v_steps)
