"""Choice of generated tokens that a running request keeps: earlier kept ones compete again with new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kvevict.policies.budgets import DensityLayers, LayeredBudget, UniformHeads, UniformLayers
from sgl_kvevict.policies.layer_view import Show
from sgl_kvevict.policies.parts import RangeScores
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import AccumulatedAttentionScorer

GENERATED_POLICIES = ("h2o", "d2o", "streaming-llm", "snapkv")
"""Policies with a rule for tokens appended to a compressed cache."""


def generated_reasons(policy: Policy | None) -> list[str]:
    """Reasons why a policy cannot be used with ``decode_block``, one sentence each."""
    name = "none" if policy is None else policy.name
    if policy is None or name not in GENERATED_POLICIES:
        return [f"policy {name!r} has no rule for tokens that are generated; allowed: {', '.join(GENERATED_POLICIES)}"]
    reasons = []
    if not policy.splittable:
        reasons.append("direction 'any' writes later tokens into earlier ones; allowed: 'causal'")
    allocator = policy.allocator
    layers = allocator.layers if isinstance(allocator, LayeredBudget) else None
    heads = allocator.heads if isinstance(allocator, LayeredBudget) else None
    if not (isinstance(layers, UniformLayers | DensityLayers) and isinstance(heads, UniformHeads)):
        reasons.append("the budget_rule has no rule for a cache that grows; allowed: 'uniform', 'density'")
    scorer = policy.scorer
    if isinstance(scorer, AccumulatedAttentionScorer) and scorer.normalize != "none":
        reasons.append(f"normalize {scorer.normalize!r} needs tokens without gaps; allowed: 'none'")
    return reasons


@dataclass(frozen=True)
class GeneratedChoice:
    """Per layer: kept entries of each head, and the mask [num_kv_heads, num_candidates], bool."""

    lens: list[int]
    kept: list[Tensor]


def choose_generated(
    policy: Policy,
    show: Show,
    num_old: Sequence[int],
    num_new: int,
    per_head: int,
    num_pinned: int,
) -> GeneratedChoice:
    """Choose among the entries kept so far and ``num_new`` new tokens; ``per_head`` on average over the layers.

    All heads of a layer have the same number of candidates: ``num_old[layer]`` entries, then new tokens, by position.
    ``show`` gives them as a range that starts at 0, and is called once per layer, in order. Every head keeps the first
    ``num_pinned`` candidates (sinks). The first call (``num_old`` all 0) splits the budget over layers by the policy;
    later ones keep these shares, as D2O keeps those of its prompt.

    Source: H2O (arXiv 2306.14048), Sec. 4, Alg. 1; D2O (arXiv 2406.13035), Sec. 3.3.
    Differs: the papers evict one entry at every step; here a block of tokens enters at once, and as many entries leave.
    """
    num_layers = len(num_old)
    limits = [old + num_new for old in num_old]
    scores, window = [], 0
    for layer in range(num_layers):
        view = show(layer)
        window = policy.kept_window(view)[0]
        scores.append(policy.scorer.score(view))
    num_first = min(num_pinned, per_head)
    num_last = min(window, per_head - num_first)
    rows = [
        RangeScores(
            score.values[None], None if score.tie_break is None else score.tie_break[None], None, num_first, num_last
        )
        for score in scores
    ]
    pinned = num_first + num_last
    if any(num_old):
        lens = share_out(num_old, limits, per_head * num_layers, pinned)
    else:
        lens = [pinned + free for free in _first_shares(policy, rows, (per_head - pinned) * num_layers)]
    num_heads = scores[0].values.shape[0]
    kept = []
    for row, length in zip(rows, lens, strict=True):
        free = torch.full((1, num_heads), length - pinned, dtype=torch.int64, device=row.values.device)
        kept.append(policy.selector.select(row, free)[0])
    return GeneratedChoice(lens, kept)


def _first_shares(policy: Policy, rows: Sequence[RangeScores], total: int) -> list[int]:
    """Per layer, candidates that each head keeps at the first choice, when all layers have equally many."""
    first, num_layers = rows[0], len(rows)
    num_heads = first.values.shape[1]
    if policy.allocator.equal_layers:
        return [total // num_layers] * num_layers
    stacked = RangeScores(torch.cat([row.values for row in rows]), None, None, first.num_first, first.num_last)
    shares = policy.allocator.allocate(stacked, total * num_heads)
    # sync: rows of different lengths are laid out on the host; once per request
    return [int(share) for share in shares[:, 0].tolist()]


def share_out(weights: Sequence[int], limits: Sequence[int], total: int, least: int = 0) -> list[int]:
    """Split ``total`` in proportion to weights, each share within ``[least, limit]``; largest remainders first.

    Weights are >= 0 and not all 0; ValueError if ``total`` does not fit the limits.
    """
    whole = sum(weights)
    parts = [divmod(weight * total, whole) for weight in weights]
    shares = [min(max(part, least), limit) for (part, _), limit in zip(parts, limits, strict=True)]
    rest = total - sum(shares)
    step = 1 if rest > 0 else -1
    order = sorted(range(len(parts)), key=lambda i: (-step * parts[i][1], i))
    while rest:
        before = rest
        for i in order:
            if rest and least <= shares[i] + step <= limits[i]:
                shares[i] += step
                rest -= step
        if rest == before:
            raise ValueError(f"a total of {total} does not fit shares of {least} to {list(limits)}")
    return shares
