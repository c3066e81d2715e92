"""A policy of tests: keeps a pseudo-random set, so that nothing follows from order or size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kvevict.policies.parts import Decision
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.ragged import MergePlan, Selection


@dataclass(frozen=True)
class PseudoRandomPolicy:
    """Keeps a deterministic pseudo-random set with very uneven runs, another one on each rank; needs no signal."""

    name: str = "pseudo-random"
    window_size: int = 0
    needs: frozenset[Signal] = frozenset()
    splittable: bool = True
    needs_passes: bool = False
    reuse_layers: int = 1
    rank: int = 0

    def select(self, show, geometry, total, protected, state=None, *, with_worth=False):
        view = show(0)
        tokens = view.num_tokens
        generator = torch.Generator().manual_seed(view.start * 1009 + tokens + self.rank * 7919)
        runs = geometry.num_runs
        score = torch.rand(runs, tokens, generator=generator) * torch.rand(runs, 1, generator=generator)
        score[:, :protected] = 2.0
        kept = torch.zeros(runs * tokens, dtype=torch.bool)
        kept[score.flatten().topk(total).indices] = True
        kept = kept.view(runs, tokens)
        keep_lens = kept.sum(1).to(torch.int32).view(geometry.num_layers, geometry.num_kv_heads)
        selection = Selection(keep_lens, kept.nonzero()[:, 1].to(torch.int32), total)
        worth = (score[kept] * 1000).to(torch.int16) if with_worth else None
        if self.splittable:
            return Decision(selection, worth=worth)
        runs, tokens_kept = kept.nonzero().unbind(1)
        layers, heads = runs // geometry.num_kv_heads, runs % geometry.num_kv_heads
        indptr = torch.arange(total + 1, dtype=torch.int32)
        return Decision(selection, MergePlan(indptr, layers, heads, tokens_kept, torch.ones(total)), worth=worth)
