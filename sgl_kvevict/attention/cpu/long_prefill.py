"""Long prefills on a CPU by PyTorch's flash attention, whose products use the processor's AMX instructions.

A request attends to everything before its new tokens without a mask, then to the new tokens causally; the two results
are merged by log-sum-exp. A single causal call is not possible: it aligns its causal mask at the first key. Layers with
a window process blocks of queries, each with a dense mask over the keys that the block can see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvevict_kernels.row_codec import RowCoding
from kvevict_kernels.row_sizes import WIDTHS, head_slot_of
from kvevict_kernels.span_runs import SpanRuns, compressed_len_of
from sgl_kvevict.attention.batch import AttentionBatch, Path
from sgl_kvevict.attention.interface import with_sink_logits

WINDOW_BLOCK = 256
"""Queries per call in a layer with a window. Keys are the window and as many again; the mask has every pair."""

_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(q [B, heads, M, D], k [B, heads, N, D], v, 0.0, is_causal, attn_mask=, scale=) -> (out, natural lse).

Scores and softmax are float32. A size of 0 ends the process, and a fully masked row has an lse of 0 instead of -inf.
"""


@dataclass(frozen=True)
class PrefillRequest:
    """One request with many new tokens."""

    rows: slice  # its new tokens in the forward
    path: Path
    cached_slots: Tensor  # [num_cached], int32, token slots of ``[compressed_len, first new token)``
    new_slots: Tensor  # [num_new], int32, token slots of the new tokens


@dataclass(frozen=True)
class _QueryBlock:
    """Consecutive new tokens of a request in a layer with a window, at positions ``[first, end)``."""

    rows: slice
    first: int
    end: int
    window: int

    @property
    def oldest(self) -> int:
        """The first position that any of the queries sees."""
        return max(self.first - self.window + 1, 0)

    def mask(self, key_positions: Tensor) -> Tensor:
        """[1, 1, num_queries, num_keys], float32: 0 for the keys that a query sees, else -inf."""
        distances = torch.arange(self.first, self.end)[:, None] - key_positions
        return torch.where((distances >= 0) & (distances < self.window), 0.0, float("-inf"))[None, None]


@dataclass(frozen=True)
class LongPrefill:
    """Runs the layers of long prefills, one request at a time."""

    k_arena: Tensor  # [num_layers, num_token_slots, num_kv_heads, head_dim]
    v_arena: Tensor  # like ``k_arena``, or the first columns of its rows
    windows: tuple[int, ...] = ()  # of the layers, see :attr:`KVGeometry.windows`
    coding: RowCoding | None = None  # of rows of 4 bits
    # Layers and heads of a span read its bounds one by one; weak, because a resize replaces the span.
    _bounds: WeakKeyDictionary[SpanRuns, tuple[list[list[int]], list[list[int]]]] = field(
        default_factory=WeakKeyDictionary
    )

    @staticmethod
    def plan(batch: AttentionBatch, requests: list[int]) -> list[PrefillRequest]:
        """Look up the token slots of some requests of a batch."""
        ends = list(accumulate(batch.new_lens))
        plans = []
        for i in requests:
            new, seq_len = batch.new_lens[i], batch.seq_lens[i]
            row = batch.req_to_token[int(batch.req_pool_indices[i])]
            cached, own = row[batch.compressed_lens[i] : seq_len - new].clone(), row[seq_len - new : seq_len].clone()
            plans.append(PrefillRequest(slice(ends[i] - new, ends[i]), batch.paths[i], cached, own))
        return plans

    def run(
        self, request: PrefillRequest, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend with the new tokens of one request: ``q`` [num_new, num_qo_heads, head_dim].

        Returns out [num_new, num_qo_heads, v_head_dim], and lse [num_new, num_qo_heads], float32.
        """
        if self.windows and self.windows[layer]:
            out, lse = self._attend_in_window(request, layer, q, sm_scale)
        else:
            # The causal part alone: PyTorch's mask begins at the first key, so earlier keys need a call without one.
            out, lse = _attend(q, *self._tokens(layer, request.new_slots), sm_scale, is_causal=True)
            if request.path:
                before = self._attend_to_path(request.path, request.cached_slots, layer, q, sm_scale)
                out, lse = _merge(before, (out, lse))
            elif request.cached_slots.numel():
                before = _attend(q, *self._tokens(layer, request.cached_slots), sm_scale)
                out, lse = _merge(before, (out, lse))
        return with_sink_logits(out, lse, sink_logits)

    def _attend_in_window(
        self, request: PrefillRequest, layer: int, q: Tensor, sm_scale: float
    ) -> tuple[Tensor, Tensor]:
        compressed_len, num_new = compressed_len_of(request.path), q.shape[0]
        slots = torch.cat([request.cached_slots, request.new_slots])
        first_new = compressed_len + request.cached_slots.numel()
        out = q.new_empty(*q.shape[:2], self.v_arena.shape[-1])
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        # In blocks: a mask of the whole prompt would have num_new * num_new numbers, almost all of them -inf.
        for begin in range(0, num_new, WINDOW_BLOCK):
            end = min(begin + WINDOW_BLOCK, num_new)
            block = _QueryBlock(slice(begin, end), first_new + begin, first_new + end, self.windows[layer])
            own_first = max(block.oldest, compressed_len)
            own = slots[own_first - compressed_len : block.end - compressed_len]
            if block.oldest >= compressed_len:
                added = block.mask(torch.arange(own_first, block.end))
                got = _attend(q[block.rows], *self._tokens(layer, own), sm_scale, added=added)
            else:
                got = self._attend_to_path(request.path, own, layer, q[block.rows], sm_scale, block)
            out[block.rows], lse[block.rows] = got
        return out, lse

    def _tokens(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of token slots, [num_tokens, num_kv_heads, head_dim]."""
        k, v = (arena[layer].flatten(1).index_select(0, slots) for arena in (self.k_arena, self.v_arena))
        return k.view(-1, *self.k_arena.shape[2:]), v.view(-1, *self.v_arena.shape[2:])

    def _attend_to_path(
        self, path: Path, own: Tensor, layer: int, q: Tensor, sm_scale: float, block: _QueryBlock | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend to a path and some of the request's own token slots, per head: runs differ, and none is padded.

        ``block`` are the queries of a layer with a window; ``own`` reaches up to the last of them. None: no key is
        hidden. Returns out and lse; 0 and -inf for a head without entries.
        """
        num_token_slots, num_heads = self.k_arena.shape[1:3]
        group = q.shape[1] // num_heads
        own_rows: Tensor = head_slot_of(layer, own, 0, num_token_slots, num_heads)  # of the first head
        out = q.new_zeros(*q.shape[:2], self.v_arena.shape[-1])
        lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
        for head in range(num_heads):
            runs = [self._run(span, layer, head, block) for span in path]
            rows = [(span.rows[run], span.bits) for span, run in zip(path, runs, strict=True)]
            rows.append((own_rows + head, WIDTHS[0]))
            # A head may have kept no entry that a block sees, and a size of 0 ends the process.
            if not any(of_span.numel() for of_span, _ in rows):
                continue
            added = None
            if block is not None:
                seen = [span.positions[run] for span, run in zip(path, runs, strict=True)]
                added = block.mask(torch.cat([*seen, torch.arange(block.end - own.numel(), block.end)]))
            heads = slice(head * group, (head + 1) * group)
            k, v = self._rows(rows, layer, head, q.dtype)
            out[:, heads], lse[:, heads] = _attend(q[:, heads], k, v, sm_scale, added=added)
        return out, lse

    def _rows(self, rows: list[tuple[Tensor, int]], layer: int, head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of rows, each list with its bits, one after the other: [num_rows, 1, head_dim], in ``dtype``."""
        both: list[list[Tensor]] = [[], []]
        for of_span, bits in rows:
            for found, is_v, arena in zip(both, (False, True), (self.k_arena, self.v_arena), strict=True):
                if bits == WIDTHS[0]:
                    stored = arena.view(-1, arena.shape[-1]).index_select(0, of_span)
                else:
                    assert self.coding is not None
                    runs = of_span.new_tensor([layer * self.k_arena.shape[2] + head])
                    stored = self.coding.load(arena, of_span, runs, is_v=is_v)
                found.append(stored.to(dtype))
        k, v = (torch.cat(found)[:, None] for found in both)
        return k, v

    def _run(self, span: SpanRuns, layer: int, head: int, block: _QueryBlock | None) -> slice:
        """One run among the segment's entries, from the first one that a block sees; bounds are read once per span."""
        bounds = self._bounds.get(span)
        if bounds is None:
            bounds = self._bounds[span] = (span.starts.tolist(), span.lens.tolist())
        start, length = bounds[0][layer][head], bounds[1][layer][head]
        if block is None:
            return slice(start, start + length)
        hidden = int(torch.searchsorted(span.positions[start : start + length], block.oldest))
        return slice(start + hidden, start + length)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sm_scale: float, *, is_causal: bool = False, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One fused call: q [num_new, num_qo_heads, head_dim], k [num_keys, num_kv_heads, head_dim], v as k or narrower.

    ``added`` [1, 1, num_new, num_keys] (float32) is added to the scores. Returns out, as wide as v, and lse
    [num_new, num_qo_heads].
    """
    num_new, num_qo_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    group = num_qo_heads // num_kv_heads
    grouped = q.view(num_new, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    shape = (num_kv_heads, group, num_keys, head_dim)
    v_head_dim = v.shape[-1]
    v = pad(v, (0, head_dim - v_head_dim))  # the call takes one width
    # Copying heads into compact memory saves 6 % at 3,000 new tokens.
    k, v = (x.to(q.dtype).transpose(0, 1)[:, None].contiguous().expand(shape) for x in (k, v))
    out, lse = _flash_attention(grouped, k, v, 0.0, is_causal, attn_mask=added, scale=sm_scale)
    out = out[..., :v_head_dim].permute(2, 0, 1, 3).reshape(*q.shape[:2], v_head_dim)
    return out, lse.permute(2, 0, 1).reshape(q.shape[:2])


def _merge(before: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine two partial softmaxes in float32, with one rounding; ``before`` may be empty (0, -inf)."""
    # A softmax of two: ``before`` without entries has -inf, which gives a weight of 0 and no NaN.
    weight = torch.sigmoid(before[1] - new[1])[..., None]
    out = torch.lerp(new[0].float(), before[0].float(), weight)
    return out.to(new[0].dtype), torch.logaddexp(before[1], new[1])
