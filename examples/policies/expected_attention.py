"""``expected-attention``: attention that future queries are expected to pay, from the distribution of past ones.

Serve it as ``expected_attention:expected_attention``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from sgl_kvevict.policies import LayerView, Policy, QueryMoments, Rotary, Scorer, Signal, TokenScores, Trait
from sgl_kvevict.policies.options import BudgetOptions


@dataclass(frozen=True)
class ExpectedAttentionScorer(Scorer):
    """Future queries are taken as Gaussian, with mean and covariance of the prompt's queries before RoPE.

    The mean rotation of the next ``num_future_positions`` positions is applied to the Gaussian; the expectation of
    ``exp(logit)`` is then closed-form. Scores are normalised over the range without sinks, which are kept anyway,
    averaged over the query heads of a group and multiplied by the value's norm.

    Source: Expected Attention (arXiv 2510.00636), Sec. 3.
    Differs: normalised over the range to compress, not over the whole prompt.
    Cost: num_tokens * head_dim^2 per query head.
    """

    options: ExpectedAttention
    traits = frozenset({Trait.COMPARABLE})

    @property
    def needs(self) -> frozenset[Signal]:
        """Query moments and keys; values for ``use_value_norm``."""
        values = {Signal.VALUES} if self.options.use_value_norm else set()
        return frozenset({Signal.QUERY_MOMENTS, Signal.KEYS, *values})

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer; ValueError without a prompt length."""
        moments = view.need(Signal.QUERY_MOMENTS, QueryMoments)
        length = view.need_prompt_length()
        head_dim = view.k_buffer.shape[-1]
        turn = mean_rotation(moments.rotary, length, self.options.num_future_positions, head_dim)
        by_head = (view.num_kv_heads, -1, head_dim)
        mean = (moments.mean @ turn.T).view(by_head)
        spread = (turn @ moments.covariance @ turn.T).view(*by_head, head_dim) if self.options.use_covariance else None
        num_sinks = min(max(self.options.num_sink_tokens - view.start, 0), view.num_tokens - 1)
        keys = view.keys
        scores = torch.empty(view.num_kv_heads, view.num_tokens, device=keys.device)
        for head in range(view.num_kv_heads):  # float32 copies are as large as the keys: one head at a time
            rows = keys[:, head].float()
            logits = mean[head] @ rows.T * view.sm_scale  # [G, N]
            if spread is not None:
                for member, one in enumerate(spread[head]):
                    logits[member] += (rows @ one).mul_(rows).sum(-1) * (view.sm_scale**2 / 2)
            logits[:, :num_sinks] = -torch.inf
            scores[head] = logits.softmax(-1).mean(0)
        if self.options.use_value_norm:
            scores = (scores + self.options.epsilon) * view.values.norm(dim=-1, dtype=torch.float32).T
        return TokenScores(scores)


def mean_rotation(rotary: Rotary, start: int, count: int, head_dim: int) -> Tensor:
    """Average of the rotation matrices of positions ``[start, start + count)``.

    Returns:
        [head_dim, head_dim], float32; ``matrix @ q`` rotates a column ``q``. Positions past the cached table are left
        out (at least its last row is used).
    """
    limit = rotary.cos_sin.shape[0]
    start = min(start, limit - 1)
    mean = rotary.cos_sin[start : min(start + count, limit)].float().mean(0, keepdim=True)
    columns = torch.eye(head_dim, device=mean.device)[:, None]
    position = torch.zeros(head_dim, dtype=torch.int64, device=mean.device)  # of the only row of the table of means
    return replace(rotary, cos_sin=mean).apply(columns, position)[:, 0].T


class ExpectedAttention(BudgetOptions):
    """The options: those of every policy with a name, and these."""

    name = "expected-attention"
    summary = "tokens that queries distributed like the prompt's are expected to attend to"
    source = "Expected Attention (arXiv 2510.00636), Sec. 3"
    use_when = "a peer; unknown questions, cheap"

    num_future_positions: int = Field(512, ge=1, description="positions after the prompt whose queries are expected")
    num_sink_tokens: int = Field(4, ge=0, description="first tokens of a path that every head keeps")
    use_covariance: bool = Field(True, description="with the second moment of the queries")
    use_value_norm: bool = Field(True, description="multiply by the norm of the value")
    epsilon: float = Field(0.0, ge=0, description="added to the attention before that")

    def build(self) -> Policy:
        """Make the policy."""
        return self.policy(ExpectedAttentionScorer(self), num_sink_tokens=self.num_sink_tokens)


def expected_attention(**options: Any) -> Policy:
    """The factory that the server calls with ``policy_options``; ConfigError names an option that does not fit."""
    return ExpectedAttention.parse(options).build()
