"""Attention on a CPU in plain PyTorch, in float32: one softmax per request, KV head and block of queries.

Simple rather than fast: the fallback where numba cannot run, and the reference of the tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.row_codec import RowCoding
from kvevict_kernels.row_sizes import head_slot_of
from kvevict_kernels.stored_rows import gather_rows
from sgl_kvevict.attention.batch import AttentionBatch, require_widths
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry

QUERY_BLOCK = 256
"""New tokens whose scores are in memory at a time."""


class TorchAttention:
    """Reference implementation; arguments as for :func:`sgl_kvevict.attention.backend.build_attention`."""

    def __init__(self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor, coding: RowCoding | None = None) -> None:
        self.geometry = geometry
        self._arenas = (k_arena, v_arena)
        self._coding = coding
        self._k_rows = k_arena.view(-1, geometry.head_dim)
        self._v_rows = v_arena.view(-1, geometry.v_head_dim)
        self._batch: AttentionBatch | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """Remember the batch: nothing is prepared."""
        require_widths(batch.paths, has_coding=self._coding is not None)
        self._batch = batch

    def run(self, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend as planned."""
        batch, geometry = self._batch, self.geometry
        shape = (-1 if batch is None else sum(batch.new_lens), geometry.num_qo_heads, geometry.head_dim)
        if batch is None or tuple(q.shape) != shape:
            raise InvariantError(f"q: planned {list(shape)}, got {list(q.shape)}")
        out = q.new_empty(*shape[:2], geometry.v_head_dim)
        lse = torch.empty(shape[:2], dtype=torch.float32, device=q.device)
        first_row = 0
        for request, (seq_len, new) in enumerate(zip(batch.seq_lens, batch.new_lens, strict=True)):
            for head in range(geometry.num_kv_heads):
                heads = slice(head * geometry.group_size, (head + 1) * geometry.group_size)
                sinks = None if sink_logits is None else sink_logits[heads].float()
                k, v, key_positions = self._keys(batch, request, layer, head)
                positions = torch.arange(seq_len - new, seq_len, device=q.device)
                tree = batch.tree(request)
                if tree is not None:
                    # A node's position is its depth: siblings share one.
                    positions = key_positions[len(key_positions) - new :] = seq_len - new + tree.sum(1) - 1
                for begin in range(0, new, QUERY_BLOCK):
                    end = min(begin + QUERY_BLOCK, new)
                    rows = slice(first_row + begin, first_row + end)
                    scaled = q[rows, heads].float().contiguous() * sm_scale
                    distances = positions[begin:end, None] - key_positions
                    is_seen = distances >= 0
                    if tree is not None:
                        is_seen[:, len(key_positions) - new :] = tree[begin:end]
                    if window := geometry.window(layer):
                        is_seen &= distances < window
                    out[rows, heads], lse[rows, heads] = _attend(scaled, is_seen, k, v, sinks)
            first_row += new
        return out, lse

    def _keys(self, batch: AttentionBatch, request: int, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys of a request and KV head: the runs of its path, then its own tokens.

        Returns K [num_keys, head_dim] and V [num_keys, v_head_dim], float32, and positions [num_keys], int64.
        """
        geometry, path = self.geometry, batch.paths[request]
        own = torch.arange(batch.compressed_lens[request], batch.seq_lens[request], device=self._k_rows.device)
        slots = batch.req_to_token[int(batch.req_pool_indices[request]), own].long()
        keys, values, positions = [], [], []
        for span in path:
            start = int(span.starts[layer, head])
            run = slice(start, start + int(span.lens[layer, head]))
            rows = span.rows[run].long()
            k, v = self._stored(layer, rows) if span.bits == 16 else self._decoded(layer, head, rows)
            keys.append(k)
            values.append(v)
            positions.append(span.positions[run].long())
        k, v = self._stored(layer, head_slot_of(layer, slots, head, geometry.num_token_slots, geometry.num_kv_heads))
        return torch.cat([*keys, k]), torch.cat([*values, v]), torch.cat([*positions, own])

    def _stored(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of head slots, float32."""
        k_scale, v_scale = self.geometry.scales.of(layer)
        return gather_rows(self._k_rows, rows, k_scale).float(), gather_rows(self._v_rows, rows, v_scale).float()

    def _decoded(self, layer: int, head: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of rows of 4 bits, float32."""
        assert self._coding is not None
        runs = rows.new_tensor([layer * self.geometry.num_kv_heads + head])
        k, v = (self._coding.load(arena, rows, runs, is_v=bool(is_v)) for is_v, arena in enumerate(self._arenas))
        return k, v


def _attend(q: Tensor, is_seen: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """One softmax per query of a KV head over the keys that it sees, ``is_seen`` [num_new, num_keys].

    q [num_new, group_size, head_dim] is already scaled. A sink logit is the score of one more key, whose value is 0.
    """
    is_read = is_seen.any(0)  # rows before a window may belong to another request by now
    k, v, is_seen = k[is_read], v[is_read], is_seen[:, is_read]
    scores = (q @ k.T).masked_fill(~is_seen[:, None], -torch.inf)
    if sink_logits is not None:
        scores = torch.cat([scores, sink_logits[:, None].expand(len(q), -1, -1)], dim=-1)
        v = torch.cat([v, v.new_zeros(1, v.shape[1])])
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
