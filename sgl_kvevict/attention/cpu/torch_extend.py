"""Several new tokens of one request: everything before them without a mask, then themselves causally.

Two fused calls and a merge replace one call with a dense mask. (Causal alignment of the fused operation is top-left,
so a single causal call cannot have keys before the first query.) Layers with a window have a mask, for blocks of
queries (:mod:`sgl_kvevict.attention.cpu.torch_window`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvevict_kernels.head_slots import head_slot_of
from kvevict_kernels.ragged_attention.cpu import fused_attention
from kvevict_kernels.span_runs import SpanRuns, waterline_of
from sgl_kvevict.attention.batch import AttentionBatch, Path
from sgl_kvevict.attention.cpu.torch_window import QueryBlock, query_blocks
from sgl_kvevict.attention.sink_logits import with_sink_logits
from sgl_kvevict.errors import InvariantError

STACKED_TOKENS = 16
"""Up to so many new tokens, the q heads of a group are stacked into one: fewer, larger products.

In layers with a window these are multiplied in float32, as decode steps are elsewhere.
"""


@dataclass
class RunBounds:
    """Starts and lengths of runs on the host, read once per span."""

    _known: WeakKeyDictionary[SpanRuns, tuple[list[list[int]], list[list[int]]]] = field(
        default_factory=WeakKeyDictionary
    )

    def run(self, span: SpanRuns, layer: int, head: int) -> slice:
        """Where one run is among the segment's entries."""
        bounds = self._known.get(span)
        if bounds is None:
            bounds = self._known[span] = (span.starts.tolist(), span.lens.tolist())
        start, length = bounds[0][layer][head], bounds[1][layer][head]
        return slice(start, start + length)


@dataclass(frozen=True)
class ExtendRequest:
    """One request with more than one new token.

    Attributes:
        rows: its new tokens in the forward.
        path: spans on its path.
        cached_slots: [num_cached], int32, token slots of ``[waterline, first new token)``.
        new_slots: [num_new], int32, token slots of the new tokens.
    """

    rows: slice
    path: Path
    cached_slots: Tensor
    new_slots: Tensor

    @property
    def waterline(self) -> int:
        """Position of the first token that has a slot of its own."""
        return waterline_of(self.path)


def plan_extend(batch: AttentionBatch, requests: list[int]) -> list[ExtendRequest]:
    """Look up the token slots of some requests of a batch."""
    if not requests:
        return []
    ends = list(accumulate(batch.new_lens))
    pool_rows = batch.req_pool_indices.tolist()
    plans = []
    for i in requests:
        new, seq_len = batch.new_lens[i], batch.seq_lens[i]
        row = batch.req_to_token[pool_rows[i]]
        plans.append(
            ExtendRequest(
                rows=slice(ends[i] - new, ends[i]),
                path=batch.paths[i],
                cached_slots=row[batch.waterlines[i] : seq_len - new].clone(),
                new_slots=row[seq_len - new : seq_len].clone(),
            )
        )
    return plans


@dataclass(frozen=True)
class ExtendAttention:
    """Runs the layers of extending requests.

    Attributes:
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim].
        v_arena: like ``k_arena``.
        bounds: host copies of run bounds.
        biases: [num_layers, num_token_slots, num_kv_heads], float32, added to the scores of entries of fitted spans;
            None: there are none.
        windows: of the layers, see :attr:`KVGeometry.windows`.
    """

    k_arena: Tensor
    v_arena: Tensor
    bounds: RunBounds
    biases: Tensor | None = None
    windows: tuple[int, ...] = ()

    def run(
        self, request: ExtendRequest, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend with the new tokens of one request.

        Args:
            request: what it reads.
            layer: layer index.
            q: [num_new, num_qo_heads, head_dim].
            sm_scale: softmax scale.
            sink_logits: [num_qo_heads]; None: there are none.

        Returns:
            out [num_new, num_qo_heads, head_dim], dtype of ``q``, and lse [num_new, num_qo_heads], float32.
        """
        if self.windows and self.windows[layer]:
            out, lse = self._attend_in_window(request, layer, q, sm_scale)
        else:
            out, lse = self._attend_to_all(request, layer, q, sm_scale)
        return with_sink_logits(out, lse, sink_logits)

    def _attend_to_all(self, request: ExtendRequest, layer: int, q: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
        new = self._attend_tokens(layer, request.new_slots, q, sm_scale, is_causal=True)
        if not request.path:
            if not request.cached_slots.numel():
                return new
            cached = self._attend_tokens(layer, request.cached_slots, q, sm_scale, is_causal=False)
            return _merge(cached, new)
        return _merge(self._attend_runs(request, layer, q, sm_scale), new)

    def _attend_tokens(
        self, layer: int, slots: Tensor, q: Tensor, sm_scale: float, *, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Attend to token slots, the same ones for all heads."""
        return _attend(q, *self._rows_of_tokens(layer, slots), sm_scale, is_causal=is_causal)

    def _rows_of_tokens(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of token slots, [num_tokens, num_kv_heads, head_dim]."""
        k = self.k_arena[layer].flatten(1).index_select(0, slots).view(-1, *self.k_arena.shape[2:])
        return k, self.v_arena[layer].flatten(1).index_select(0, slots).view(-1, *self.v_arena.shape[2:])

    def _attend_in_window(
        self, request: ExtendRequest, layer: int, q: Tensor, sm_scale: float
    ) -> tuple[Tensor, Tensor]:
        waterline, cached = request.waterline, request.cached_slots.numel()
        slots = torch.cat([request.cached_slots, request.new_slots])
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for block in query_blocks(q.shape[0], waterline + cached, self.windows[layer]):
            first = max(block.oldest, waterline)
            own = slots[first - waterline : block.end - waterline]
            mine = q[block.rows].float() if q.shape[0] <= STACKED_TOKENS else q[block.rows]
            if block.oldest >= waterline:
                k, v = self._rows_of_tokens(layer, own)
                added = block.mask(torch.arange(first, block.end))
                got = _attend(mine, k, v, sm_scale, is_causal=False, added=added)
            else:
                got = self._attend_to_block(request.path, block, own, layer, mine, sm_scale)
            out[block.rows], lse[block.rows] = got
        return out, lse

    def _attend_to_block(
        self, path: Path, block: QueryBlock, own: Tensor, layer: int, q: Tensor, sm_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend with a block that sees into the path, head by head.

        Args:
            path: spans of the request.
            block: the queries.
            own: [num_own], int32, token slots up to the block's last one.
            layer: layer index.
            q: [num_queries, num_qo_heads, head_dim].
            sm_scale: softmax scale.
        """
        num_token_slots, num_heads, head_dim = self.k_arena.shape[1:]
        group = q.shape[1] // num_heads
        k_rows, v_rows = self.k_arena.view(-1, 1, head_dim), self.v_arena.view(-1, 1, head_dim)
        own_rows: Tensor = head_slot_of(layer, own, 0, num_token_slots, num_heads)  # of the first head
        own_positions = torch.arange(block.end - own.numel(), block.end, dtype=torch.int32)
        biases = self.biases if any(span.is_fitted for span in path) else None
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for head in range(num_heads):
            runs = [self._seen_run(span, layer, head, block.oldest) for span in path]
            head_slots = torch.cat([*(slots for slots, _ in runs), own_rows + head])
            added = block.mask(torch.cat([*(positions for _, positions in runs), own_positions]))
            if biases is not None:
                added = added + self._of_entries(biases, head_slots, own.numel())
            heads = slice(head * group, (head + 1) * group)
            k, v = k_rows.index_select(0, head_slots), v_rows.index_select(0, head_slots)
            out[:, heads], lse[:, heads] = _attend(q[:, heads], k, v, sm_scale, is_causal=False, added=added)
        return out, lse

    def _seen_run(self, span: SpanRuns, layer: int, head: int, oldest: int) -> tuple[Tensor, Tensor]:
        """Head slots and positions of a run's entries from a position on."""
        if span.positions is None:
            raise InvariantError("a layer with a window reads a span whose positions are not known")
        run = self.bounds.run(span, layer, head)
        positions = span.positions[run]
        first = int(torch.searchsorted(positions, oldest))
        return span.head_slots[run][first:], positions[first:]

    def _attend_runs(self, request: ExtendRequest, layer: int, q: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
        """Attend to the path and the cached tokens, head by head: each has its own run, none is padded."""
        num_token_slots, num_heads, head_dim = self.k_arena.shape[1:]
        group = q.shape[1] // num_heads
        k_rows, v_rows = self.k_arena.view(-1, 1, head_dim), self.v_arena.view(-1, 1, head_dim)
        cached: Tensor = head_slot_of(layer, request.cached_slots, 0, num_token_slots, num_heads)  # of the first head
        biases = self.biases if any(span.is_fitted for span in request.path) else None
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
        for head in range(num_heads):
            runs = [span.head_slots[self.bounds.run(span, layer, head)] for span in request.path]
            head_slots = torch.cat([*runs, cached + head])
            if head_slots.numel():
                heads = slice(head * group, (head + 1) * group)
                k, v = k_rows.index_select(0, head_slots), v_rows.index_select(0, head_slots)
                mask = None if biases is None else self._of_entries(biases, head_slots, cached.numel())
                out[:, heads], lse[:, heads] = _attend(q[:, heads], k, v, sm_scale, is_causal=False, added=mask)
        return out, lse

    @staticmethod
    def _of_entries(biases: Tensor, head_slots: Tensor, num_cached: int) -> Tensor:
        """[1, 1, 1, num_keys], float32, biases of runs, and 0 for the cached tokens behind them."""
        added = biases.view(-1).index_select(0, head_slots)
        added[added.numel() - num_cached :] = 0.0
        return added.view(1, 1, 1, -1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sm_scale: float, *, is_causal: bool, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One fused call.

    Args:
        q: [num_new, num_qo_heads, head_dim].
        k: [num_keys, num_kv_heads, head_dim].
        v: like ``k``.
        sm_scale: softmax scale.
        is_causal: key ``j`` is visible from query ``j`` on.
        added: [1, 1, 1 or num_new, num_keys], float32, added to the scores; None: nothing is.

    Returns:
        out [num_new, num_qo_heads, head_dim] and lse [num_new, num_qo_heads].
    """
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    num_new, num_qo_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    group = num_qo_heads // num_kv_heads
    grouped = q.view(num_new, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    # Compact heads are worth their copy: 6 % at 3,000 new tokens.
    k, v = k.transpose(0, 1)[:, None].contiguous(), v.transpose(0, 1)[:, None].contiguous()
    if num_new <= STACKED_TOKENS and not is_causal:
        stacked = grouped.reshape(num_kv_heads, 1, group * num_new, head_dim)
        if added is not None and added.shape[2] > 1:
            added = added.repeat(1, 1, group, 1)
        out, lse = fused_attention(stacked, k, v, 0.0, False, attn_mask=added, scale=sm_scale)
        out, lse = out.view(grouped.shape), lse.reshape(grouped.shape[:3])
    else:
        shape = (num_kv_heads, group, num_keys, head_dim)
        k, v = k.expand(shape), v.expand(shape)
        out, lse = fused_attention(grouped, k, v, 0.0, is_causal, attn_mask=added, scale=sm_scale)
    return out.permute(2, 0, 1, 3).reshape(q.shape), lse.permute(2, 0, 1).reshape(q.shape[:2])


def _merge(before: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine two partial softmaxes in float32, with one rounding; ``before`` may be empty (0, -inf)."""
    weight = torch.sigmoid(before[1] - new[1])[..., None]
    out = torch.lerp(new[0].float(), before[0].float(), weight)
    return out.to(new[0].dtype), torch.logaddexp(before[1], new[1])
