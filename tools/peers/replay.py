"""Run our policies on the tensors of a recording and compare kept positions with the press's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from peers.cases import Case
from peers.records import kept_key, record_path, scores_key
from safetensors import safe_open
from torch import Tensor

from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import LayerView, QueryWindow, Signal, build_policy

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "policies"))
ROUNDING = 1e-5
"""Relative distance of a press's score from its threshold below which two float32 sums may swap tokens."""


class Recording:
    """One prompt's model run, shown to policies as a server would."""

    def __init__(self, prompt_name: str) -> None:
        self._file: Any = safe_open(record_path(prompt_name), framework="pt")
        self.keys = self._file.get_tensor("keys")
        self.values = self._file.get_tensor("values")
        self.queries = self._file.get_tensor("queries")
        self.lse = self._file.get_tensor("lse")
        self.accumulated = self._file.get_tensor("accumulated")
        num_layers, self.num_tokens, num_kv_heads, head_dim = self.keys.shape
        self.geometry = KVGeometry(num_layers, self.queries.shape[2], num_kv_heads, head_dim, self.num_tokens + 1)
        # Slots in no order, like an arena's; slot 0 is padding.
        self.slots = 1 + torch.randperm(self.num_tokens, generator=torch.Generator().manual_seed(0))

    def kept(self, kept_share: float, case: Case) -> Tensor:
        """What the press kept, [L, H, N] bool."""
        kept: Tensor = self._file.get_tensor(kept_key(kept_share, case.name))
        return kept

    def scores(self, kept_share: float, case: Case) -> Tensor:
        """The press's scores, [L, H, N]."""
        scores: Tensor = self._file.get_tensor(scores_key(kept_share, case.name))
        return scores

    def show(self, layer: int, tail: int, window_size: int, needs: frozenset[Signal]) -> LayerView:
        """The layer as a policy sees it whose range is all but the last ``tail`` tokens."""
        buffers = torch.full((2, self.num_tokens + 1, *self.keys.shape[2:]), torch.nan)
        buffers[0, self.slots], buffers[1, self.slots] = self.keys[layer], self.values[layer]
        end = self.num_tokens - tail
        signals: dict[Signal, object] = {}
        if window_size:
            start = self.num_tokens - window_size
            signals[Signal.WINDOW_QUERIES] = QueryWindow(
                self.queries[layer, start:], self.lse[layer, start:].contiguous(), start
            )
        if Signal.ACCUMULATED_ATTENTION in needs:
            signals[Signal.ACCUMULATED_ATTENTION] = self.accumulated[layer, :, :end]
        return LayerView(
            layer=layer,
            start=0,
            k_buffer=buffers[0],
            v_buffer=buffers[1],
            token_slots=self.slots[:end],
            sm_scale=self.geometry.head_dim**-0.5,
            signals=signals,
            num_prompt_tokens=self.num_tokens,
        )

    def keep(self, case: Case, num_entries: int) -> Tensor:
        """What our policy keeps of the prompt, the tail included, [L, H, N] bool."""
        policy = build_policy(case.served, case.options)
        if policy is None:
            raise ValueError(f"case {case.name}: policy {case.policy!r} keeps everything")
        needs, window_size = policy.needs, policy.scorer.window_size
        total = num_entries - case.tail * self.geometry.num_runs
        order = policy.order(
            lambda layer: self.show(layer, case.tail, window_size, needs), self.geometry, total, case.protected
        )
        return torch.nn.functional.pad(order.keys >= 0, (0, case.tail), value=True)  # what is kept at the budget


def differing_heads(recording: Recording, kept_share: float, case: Case) -> Tensor:
    """Heads [L, H] whose sets differ in more than tokens with equal scores; both sides keep as many entries."""
    theirs = recording.kept(kept_share, case)
    num_entries = int(theirs.sum())
    ours = recording.keep(case, num_entries)
    if int(ours.sum()) != num_entries:
        raise ValueError(f"case {case.name}: {int(ours.sum())} entries instead of {num_entries}")
    return (ours != theirs).any(-1) & ~only_rounding(recording.scores(kept_share, case), ours, theirs)


def only_rounding(scores: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
    """Heads [L, H] that differ by an exchange of tokens whose press scores are equal up to rounding.

    The exchange is within a head, or (AdaKV) among the heads of a layer.
    """
    swapped = ours ^ theirs
    high, low = scores.masked_fill(~swapped, -torch.inf), scores.masked_fill(~swapped, torch.inf)
    in_head = (high.amax(-1) - low.amin(-1)) <= ROUNDING * high.abs().masked_fill(~swapped, 0).amax(-1)
    in_head &= ours.sum(-1) == theirs.sum(-1)
    in_layer = high.amax((1, 2)) - low.amin((1, 2)) <= ROUNDING * high.abs().masked_fill(~swapped, 0).amax((1, 2))
    in_layer &= ours.sum((1, 2)) == theirs.sum((1, 2))
    return in_head | in_layer[:, None]
