from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from sgl_kvevict.policies import RangeScores
from sgl_kvevict.policies.budgets import AdaptiveHeads, AllLayersBudget, LayeredBudget, UniformHeads, UniformLayers
from sgl_kvevict.policies.ranking import top_mask

EX1 = [[0.30, 0.25, 0.20, 0.15, 0.10], [0.70, 0.20, 0.05, 0.03, 0.02], [0.90, 0.06, 0.02, 0.01, 0.01]]
Make = Callable[..., RangeScores]


def adaptive(safeguard: str = "none", alpha: float = 0.2) -> LayeredBudget:
    return LayeredBudget(UniformLayers(), AdaptiveHeads(safeguard, alpha))


def retained(scores: RangeScores, keep_lens: torch.Tensor) -> float:
    return float(scores.values[top_mask(scores.keys, keep_lens)].double().sum())


def test_algorithm_1_on_the_worked_example(range_scores: Make) -> None:
    """specs/ada_kv.md 9.1, 9.2: the split, the mass it retains, the bound, and brute force."""
    scores = range_scores(EX1)
    hits = adaptive().allocate(scores, 6)
    uniform = LayeredBudget(UniformLayers(), UniformHeads()).allocate(scores, 6)
    assert hits.tolist() == [[3, 2, 1]] and uniform.tolist() == [[2, 2, 2]]
    assert retained(scores, hits) == pytest.approx(2.55, abs=1e-6)
    assert retained(scores, uniform) == pytest.approx(2.41, abs=1e-6)
    assert 2 * 3 - 2 * retained(scores, hits) == pytest.approx(0.90, abs=1e-5)
    best = max(retained(scores, torch.tensor([split])) for split in product(range(6), repeat=3) if sum(split) == 6)
    assert best == pytest.approx(2.55, abs=1e-6)


def test_conservation_and_limits(range_scores: Make) -> None:
    """specs/ada_kv.md 9.3, 9.5."""
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(1, 4, 9, generator=generator)
    for total in range(37):
        hits = adaptive().allocate(range_scores(values), total)
        assert int(hits.sum()) == total and int(hits.max()) <= 9
    assert adaptive().allocate(range_scores(values), 36).tolist() == [[9] * 4]
    same = values[:, :1].expand(1, 4, 9).contiguous()
    assert adaptive().allocate(range_scores(same), 12).tolist() == [[3] * 4]
    assert torch.equal(adaptive().allocate(range_scores(values), 13), adaptive().allocate(range_scores(values * 4), 13))
    louder = values.clone()
    louder[0, 2] *= 2
    before, after = (adaptive().allocate(range_scores(v), 13)[0, 2] for v in (values, louder))
    assert after >= before


def test_union_of_kept_sets_is_the_global_top_set(range_scores: Make) -> None:
    """specs/ada_kv.md 9.4."""
    scores = range_scores(torch.rand(1, 4, 9, generator=torch.Generator().manual_seed(2)))
    mask = top_mask(scores.keys, adaptive().allocate(scores, 13))
    assert torch.equal(mask.flatten(), top_mask(scores.keys.flatten(), 13))


@pytest.mark.parametrize(("safeguard", "share"), [("paper", 0.8), ("authors_code", 0.2), ("kvpress", 0.2)])
def test_safeguard_floor(range_scores: Make, safeguard: str, share: float) -> None:
    """specs/ada_kv.md 9.8: the poorest head keeps its floor of the uniform share."""
    values = torch.rand(1, 4, 50, generator=torch.Generator().manual_seed(3)) + torch.tensor([0, 5, 6, 7])[:, None]
    hits = adaptive(safeguard).allocate(range_scores(values), 80)
    assert int(hits.sum()) == 80 and int(hits.min()) >= int(share * 20)


def test_heads_permute_and_layers_are_independent(range_scores: Make) -> None:
    """specs/ada_kv.md 9.22, 9.23."""
    values = torch.rand(2, 4, 20, generator=torch.Generator().manual_seed(5))
    hits = adaptive("authors_code").allocate(range_scores(values), 48)
    order = [2, 0, 3, 1]
    assert torch.equal(
        adaptive("none").allocate(range_scores(values[:, order]), 48),
        adaptive("none").allocate(range_scores(values), 48)[:, order],
    )
    changed = values.clone()
    changed[1] = changed[1].flip(-1) ** 3
    assert torch.equal(adaptive("authors_code").allocate(range_scores(changed), 48)[0], hits[0])


def test_kvpress_safeguard_counts_pinned_tokens(range_scores: Make) -> None:
    """kvpress protects int(alpha * kept) tokens of each head, the window among them."""
    values = torch.zeros(1, 2, 30)
    values[0, 1] = 1.0
    hits = adaptive("kvpress", 0.5).allocate(range_scores(values, first=2, last=2), 12)
    assert hits.tolist() == [[1, 11]]  # int(0.5 * (6 + 4)) - 4 = 1


def test_all_layers_compete_for_one_budget(range_scores: Make) -> None:
    values = torch.rand(3, 2, 40, generator=torch.Generator().manual_seed(6))
    values[1] *= 0.01
    scores = range_scores(values)
    free = AllLayersBudget(0.0).allocate(scores, 60)
    assert int(free.sum()) == 60 and free[1].tolist() == [0, 0]
    mask = top_mask(scores.keys, free)
    assert torch.equal(mask.flatten(), top_mask(scores.keys.flatten(), 60))
    floored = AllLayersBudget(0.3).allocate(scores, 60)
    assert int(floored.sum()) == 60 and floored[1].tolist() == [3, 3]
