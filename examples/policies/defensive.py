"""``defensive``: the window's largest attention instead of its mean, times the norm of the value.

Serve it as ``defensive:defensive``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from sgl_kvevict.policies import LayerView, Policy, QueryWindow, Scorer, Signal, TokenScores, Trait
from sgl_kvevict.policies.options import OneBudgetOptions


@dataclass(frozen=True)
class RobustAttentionScorer(Scorer):
    """Largest attention of the last ``window_size`` queries, times the norm of the value after the output projection.

    The maximum keeps tokens that a single query needed. ``use_floor`` raises it to at least the mean over the range, so
    that heads with diffuse attention do not rank by noise.

    Source: DefensiveKV (max over window and group, floored by the mean); CriticalKV (arXiv 2502.03805), Sec. 4 (norm).
    Differs: the 2-norm over all query heads of a group instead of the 1-norm of each.
    Cost: window_size * num_tokens * head_dim per query head, and num_tokens * head_dim^2 per KV head.
    """

    window_size: int = 32
    use_floor: bool = True
    use_value_norm: bool = True
    traits = frozenset({Trait.COMPARABLE})

    @property
    def needs(self) -> frozenset[Signal]:
        """Window and keys; values and output projection only for the norm."""
        norm = {Signal.VALUES, Signal.OUTPUT_GRAM} if self.use_value_norm else set()
        return frozenset({Signal.WINDOW_QUERIES, Signal.KEYS, *norm})

    @property
    def kept_window(self) -> int:
        """The whole window."""
        return self.window_size

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer."""
        peaks = largest_attention(view, view.need_window().last(self.window_size))
        if self.use_floor:
            peaks = peaks.clamp(min=peaks.mean(-1, keepdim=True))
        if self.use_value_norm:
            peaks = peaks * _output_norms(view)
        return TokenScores(peaks)


def largest_attention(view: LayerView, window: QueryWindow) -> Tensor:
    """[num_kv_heads, num_tokens], float32: most that a query of the window pays a token, over a group's query heads."""
    num_queries, _, head_dim = window.queries.shape
    keys, positions = view.keys, torch.arange(view.num_tokens, device=view.k_buffer.device) + view.start
    last_seen = torch.arange(window.start, window.end, device=keys.device)
    hidden = (positions > last_seen[:, None]).unsqueeze(1)  # [num_queries, 1, num_tokens]
    queries = window.queries.float().view(num_queries, view.num_kv_heads, -1, head_dim)
    lse = window.lse.view(num_queries, view.num_kv_heads, -1)
    peaks = torch.empty(view.num_kv_heads, view.num_tokens, device=keys.device)
    for head in range(view.num_kv_heads):  # weights take window * group * tokens numbers: one head at a time
        logits = queries[:, head] @ keys[:, head].float().T * view.sm_scale - lse[:, head, :, None]
        peaks[head] = logits.masked_fill_(hidden, -torch.inf).exp_().amax((0, 1))
    return peaks


def _output_norms(view: LayerView) -> Tensor:
    """[num_kv_heads, num_tokens], float32: norm of each value after the output projection."""
    values = view.values.transpose(0, 1).float()
    projected = values @ view.need(Signal.OUTPUT_GRAM, Tensor)
    return projected.mul_(values).sum(-1).clamp_(min=0).sqrt_()


class Defensive(OneBudgetOptions):
    """The options: those of every policy with a name, and these."""

    name = "defensive"
    summary = "the largest attention of the last queries, times the size of the value; one budget for all layers"
    source = "DefensiveKV; CriticalKV (arXiv 2502.03805), Sec. 4"
    use_when = "a peer; the question ends the prompt"

    window_size: int = Field(32, ge=1, description="queries at the end of the prompt whose attention scores tokens")
    use_floor: bool = Field(True, description="no token counts less than the average one of its head")
    use_value_norm: bool = Field(True, description="multiply by the norm of the value through the output projection")

    def build(self) -> Policy:
        """Make the policy."""
        return self.policy(RobustAttentionScorer(self.window_size, self.use_floor, self.use_value_norm))


def defensive(**options: Any) -> Policy:
    """The factory that the server calls with ``policy_options``; ConfigError names an option that does not fit."""
    return Defensive.parse(options).build()
