"""A policy of tests: keeps a pseudo-random set, so that nothing follows from order or size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kvevict.policies.order import RangeOrder, facts_of, order_of
from sgl_kvevict.policies.parts import RangeScores
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.ragged import MergePlan


class KeepsEach:
    """A merger that merges each kept entry with itself alone."""

    def merge(self, views, kept):
        layers, heads, indices = kept.nonzero().unbind(1)
        indptr = torch.arange(len(layers) + 1, dtype=torch.int32)
        return MergePlan(indptr, layers, heads, indices.int(), torch.ones(len(layers)))


@dataclass(frozen=True)
class PseudoRandomPolicy:
    """Keeps a deterministic pseudo-random set with very uneven runs, another one on each rank; needs no signal."""

    name: str = "pseudo-random"
    window_size: int = 0
    needs: frozenset[Signal] = frozenset()
    merger: KeepsEach | None = None
    compresses: bool = True
    reuse_layers: int = 1
    rank: int = 0

    @property
    def scorer(self):
        return self  # which is asked for its window only

    def order(self, show, geometry, total, protected, protected_last=0):
        view = show(0)
        tokens, runs = view.num_tokens, geometry.num_runs
        generator = torch.Generator().manual_seed(view.start * 1009 + tokens + self.rank * 7919)
        score = torch.rand(runs, tokens, generator=generator) * torch.rand(runs, 1, generator=generator)
        score[:, :protected] = score[:, tokens - protected_last :] = 2.0
        kept = torch.zeros(runs * tokens, dtype=torch.bool)
        kept[score.flatten().topk(total).indices] = True
        shape = geometry.num_layers, geometry.num_kv_heads, tokens
        scores, kept = RangeScores(score.view(shape), None, None, protected, protected_last), kept.view(shape)
        return RangeOrder(self.name, order_of(scores, kept, comparable=True), total, facts_of(scores, kept))
