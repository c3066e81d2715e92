"""A decode step of Triton's kernels that a graph has recorded, beside an eager one; on a CPU a tape is the graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from helpers.graph_tape import GraphTape, recorded
from helpers.implementations import CUDA, TRITON, Runner
from helpers.tolerance import assert_same_bits
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.triton.attention import TritonAttention


class Captured:
    """A recorded step of all layers for so many requests, on the arena of a world; with ``new_len`` > 1, of trees."""

    def __init__(self, world: Any, num_requests: int, device: str, new_len: int = 1) -> None:
        self.world = world
        self.new_len = new_len
        geometry = world.geometry
        self.attention = TritonAttention(geometry, world.k.to(device), world.v.to(device), coding=world.coding)
        arenas = self.attention.k_arena, self.attention.v_arena
        self.eager = TritonAttention(geometry, *arenas, coding=world.coding)
        self.runner = Runner(world, CUDA if device == "cuda" else TRITON)
        self.num_requests = num_requests
        self.seq_lens = torch.ones(num_requests, dtype=torch.int64, device=device)
        self.pool_rows = torch.zeros(num_requests, dtype=torch.int64, device=device)
        self.req_to_token = world.req_to_token.to(device).clone()
        shape = (geometry.num_layers, num_requests * new_len, geometry.num_qo_heads, geometry.head_dim)
        self.q = torch.zeros(shape, dtype=world.dtype, device=device)
        self.visible = torch.ones(num_requests * new_len, dtype=torch.int64, device=device)
        self.tape = GraphTape()
        self.attention.start_capture(num_requests, new_len)
        self.results, self._replay = recorded(self._step, self.tape, device)

    def _step(self) -> list[tuple[Tensor, Tensor]]:
        ends, visible = (self.seq_lens, None) if self.new_len == 1 else (self.seq_lens + self.new_len, self.visible)
        self.attention.start_step(ends, self.pool_rows, self.req_to_token, visible)
        return [self._run(self.attention, layer, q) for layer, q in enumerate(self.q)]

    def _run(self, attention: TritonAttention, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        return attention.run(layer, q, self.world.sm_scale, self.world.sink_logits)

    def check(self) -> None:
        """Replay the world's batch, filled up, and compare with an eager step of it, bit by bit."""
        world = self.world
        num_real = len(world.paths)
        padding = self.num_requests - num_real
        self.attention.k_arena.copy_(world.k)
        self.attention.v_arena.copy_(world.v)
        self.req_to_token.copy_(world.req_to_token)
        self.q.copy_(torch.randn(self.q.shape).to(self.q.dtype))
        before = 0 if self.new_len == 1 else self.new_len  # SGLang counts drafts apart
        self.seq_lens.copy_(torch.tensor([length - before for length in world.seq_lens] + [1] * padding))
        self.visible[: num_real * self.new_len] = self._trees(num_real)
        self.pool_rows.copy_(torch.tensor(world.rows + [0] * padding))
        batch = self._batch()
        self.attention.follow(batch, self.num_requests)
        self._replay()
        self.eager.plan(batch)
        for layer, (out, lse) in enumerate(self.results):
            real = slice(num_real * self.new_len)
            want_out, want_lse = self._run(self.eager, layer, self.q[layer, real])
            assert want_out.isfinite().all()
            assert_same_bits(f"out of layer {layer}", out[real], want_out)
            assert_same_bits(f"lse of layer {layer}", lse[real], want_lse)

    def _batch(self) -> AttentionBatch:
        if self.new_len == 1:
            return self.runner.batch()
        news = [self.new_len] * len(self.world.paths)
        return replace(self.runner.batch(news), visible=self.visible[: sum(news)].clone())

    def _trees(self, num_trees: int) -> Tensor:
        """Bits of random trees: every node has a parent among those before it."""
        numbers = []
        for _ in range(num_trees):
            tree = [1]
            for node in range(1, self.new_len):
                tree.append(tree[int(torch.randint(node, ()))] | 1 << node)
            numbers += tree
        return torch.tensor(numbers)
