from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from sgl_kvevict.policies import build_policy
from sgl_kvevict.policies.budgets import PyramidLayers, pyramid_schedule


def released_schedule(base: int, limit: int, num_layers: int, beta: int = 20) -> list[int]:
    """The authors' code: every quantity floored, which overspends."""
    low = base // beta
    high = 2 * base - low
    if high >= limit:
        high, low = limit, 2 * base - limit
    step = (high - low) // (num_layers - 1)
    return [high - layer * step for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("budget", "length", "first", "step", "last", "total"),
    [(1024, 16384, 1935, 60, 75, 32160), (128, 16384, 188, 5, 33, 3536), (1024, 1500, 1468, 30, 538, 32096)],
)
def test_schedule_is_the_released_one_without_its_overspending(budget, length, first, step, last, total):
    """specs/ada_kv.md 4.3 and 9.25."""
    released = released_schedule(budget - 32, length - 32, 32)
    assert (released[0], released[0] - released[1], released[-1]) == (first, step, last)
    assert sum(released) == total > 32 * (budget - 32)
    ours = pyramid_schedule(Fraction(budget - 32), length - 32, 32, 20)
    assert sum(ours) == 32 * (budget - 32)
    assert abs(ours[0] - first) < 1 and 0 <= ours[0] - ours[1] - step < 1


def test_layers_spend_the_budget_exactly_and_fall_with_depth(range_scores):
    scores = range_scores(torch.zeros(5, 3, 40))
    for total in (0, 7, 15 * 8, 15 * 17 + 4, 15 * 39, 15 * 40):
        totals = PyramidLayers().totals(scores, total)
        assert isinstance(totals, tuple) and sum(totals) == total
        assert list(totals) == sorted(totals, reverse=True) and min(totals) >= 0 and max(totals) <= 120
    assert PyramidLayers(beta=1).totals(scores, 75) == (15,) * 5
    assert PyramidLayers().totals(range_scores(torch.zeros(1, 3, 40)), 33) == (33,)


def test_policies(random_prompt):
    prompt = random_prompt(num_layers=5)
    for name in ("pyramidkv", "ada-pyramidkv"):
        lens = prompt.run(build_policy(name, {"window_size": 8}), 15 * 14, protected=4).selection.keep_lens
        assert lens.sum(1).tolist() == [3 * 4 + n for n in (59, 44, 30, 16, 1)]
        assert (lens[1].max() - lens[1].min() <= 1) == (name == "pyramidkv")
