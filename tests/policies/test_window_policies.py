from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.decisions import Run, built, of_paper


def golden_prompt(make_prompt: Run, tail: int = 4) -> Any:
    """specs/ada_kv.md 9.17: h=3, n=24, d_h=4; queries of all positions (only the last 4 are used)."""
    head = torch.arange(3.0)[None, :, None]
    token = torch.arange(24.0)[:, None, None]
    channel = torch.arange(4.0)[None, None, :]
    phase = (token + 1) * (channel + 1) * (head + 1)
    keys = torch.sin(phase.double() * 0.37) * (1 + head)
    queries = torch.cos(phase.double() * 0.21) * (1 + 0.5 * head)
    return make_prompt([keys.float()], [queries.float()], tail=tail, window=4)


POOL_MEAN = [[4, 5, 12, 13, 14], [3, 4, 5, 6, 12, 13], [2, 3, 4, 13, 16, 17, 18]]
MEAN_POOL = [[4, 5, 12, 13, 14], [3, 4, 5, 6, 12, 13], [2, 3, 4, 11, 12, 13, 17]]


@pytest.mark.parametrize(("options", "expected"), [({}, POOL_MEAN), ({"order": "mean-pool"}, MEAN_POOL)], ids=str)
def test_golden_run_of_algorithm_2(make_prompt, kept, options, expected):
    prompt = golden_prompt(make_prompt)
    decision = prompt.run(of_paper("ada-kv", window_size=4, kernel_size=3, **options), 18)
    assert decision.selection.keep_lens.tolist() == [[5, 6, 7]]
    assert kept(decision) == [expected]
    assert decision.merge is None


@pytest.mark.parametrize("order", ["pool-mean", "mean-pool"])
def test_golden_run_of_the_other_safeguards(make_prompt, order):
    prompt = golden_prompt(make_prompt)
    options = {"window_size": 4, "kernel_size": 3, "order": order}
    assert prompt.run(built("ada-snapkv", **options), 18).selection.keep_lens.tolist() == [[1, 7, 10]]
    free = built("snapkv", budget_rule="all-heads", **options)
    assert prompt.run(free, 18).selection.keep_lens.tolist() == [[0, 7, 11]]
    assert prompt.run(built("snapkv", **options), 18).selection.keep_lens.tolist() == [[6, 6, 6]]


def test_window_inside_the_range_is_kept_and_paid_for(make_prompt, kept):
    """specs/ada_kv.md 9.18: with no tail the total is B = 30 and every head holds the window."""
    prompt = golden_prompt(make_prompt, tail=0)
    ada = built("ada-snapkv", window_size=4, kernel_size=3, safeguard="paper")
    decision = prompt.run(ada, 30)
    assert decision.selection.keep_lens.tolist() == [[9, 10, 11]]
    assert kept(decision) == [[[*run, 20, 21, 22, 23] for run in POOL_MEAN]]
    partly = golden_prompt(make_prompt, tail=2).run(ada, 24)
    assert all(run[-2:] == [20, 21] for run in kept(partly)[0])
    loose = built("snapkv", window_size=4, kernel_size=1, keep_window=False)
    assert any(run[-4:] != [20, 21, 22, 23] for run in kept(prompt.run(loose, 15))[0])


def window_prompt(from_weights: Run, weights: list[list[list[float]]]) -> Any:
    """A prompt whose last queries attend to its past with exactly these weights [head][query][key].

    The mass missing from a row lies on the window, which is the tail.
    """
    past = torch.tensor(weights, dtype=torch.float64)  # [H, W, N]
    num_heads, window, num_past = past.shape
    rows = torch.cat([past, torch.zeros(num_heads, window, window, dtype=torch.float64)], dim=-1)
    for query in range(window):
        rows[:, query, num_past + query] = 1 - past[:, query].sum(-1)
    return from_weights([rows], tail=window)


def test_pooling_order(from_weights, kept):
    """specs/ada_kv.md 9.14."""
    rows = [
        [[0.10, 0.40, 0.10, 0.10, 0.10], [0.10, 0.10, 0.10, 0.40, 0.10]],
        [[0.05, 0.05, 0.05, 0.05, 0.60], [0.05, 0.05, 0.05, 0.05, 0.50]],
    ]
    prompt = window_prompt(from_weights, rows)
    expected = {"pool-mean": [0.25, 0.25, 0.40, 0.25, 0.25], "mean-pool": [0.25] * 5}
    for order, head_0 in expected.items():
        options = {"window_size": 2, "kernel_size": 3, "order": order, "budget_rule": "all-heads"}
        chosen = built("snapkv", **options)
        scores = chosen.scorer.score(prompt.show(0))
        torch.testing.assert_close(scores.values[0], torch.tensor(head_0))
        torch.testing.assert_close(scores.values[1], torch.tensor([0.05, 0.05, 0.05, 0.55, 0.55]))
        decision = prompt.run(chosen, 6)
        assert decision.selection.keep_lens.tolist() == [[4, 2]]
        assert (2 in kept(prompt.run(built("snapkv", **{**options, "budget_rule": "uniform"}), 2))[0][0]) == (
            order == "pool-mean"
        )


def test_softmax_covers_the_window_too(from_weights):
    """specs/ada_kv.md 9.15: a head that looks at the window mostly has little past mass and gets nothing."""
    prompt = window_prompt(from_weights, [[[0.02] * 5], [[0.50, 0.20, 0.10, 0.06, 0.04]]])
    decision = prompt.run(built("snapkv", window_size=1, kernel_size=1, budget_rule="all-heads"), 4)
    assert decision.selection.keep_lens.tolist() == [[0, 4]]


def test_the_peak_of_a_plateau_is_kept(from_weights, kept):
    """specs/ada_kv.md 9.16: ties of the pooled score go to the unpooled one, so the spike survives."""
    row = [0.01] * 20
    row[10] = 0.5
    prompt = window_prompt(from_weights, [[row]])
    snapkv = built("snapkv", window_size=1, kernel_size=7)
    assert kept(prompt.run(snapkv, 1)) == [[[10]]]
    assert kept(prompt.run(snapkv, 3)) == [[[7, 8, 10]]]


def oracle(weights: Tensor, num_heads: int, total: int, protected: int) -> list[list[int]]:
    """Ada-SnapKV without pool in plain Python: sinks aside, mix 0.8, largest remainder, low position wins."""
    scores = weights.mean(1).unflatten(0, (num_heads, -1)).mean(1)[:, protected:].tolist()
    width, net = len(scores[0]), total - num_heads * protected
    order = sorted((-scores[h][i], h, i) for h in range(num_heads) for i in range(width))
    hits = [sum(h == head for _, h, _ in order[:net]) for head in range(num_heads)]
    shares = [(4 * hit * num_heads + net) for hit in hits]  # times 5 * num_heads
    budgets = [share // (5 * num_heads) for share in shares]
    by_rest = sorted(range(num_heads), key=lambda h: (-(shares[h] % (5 * num_heads)), h))
    for head in by_rest[: net - sum(budgets)]:
        budgets[head] += 1
    best = [sorted(range(width), key=lambda i, row=row: (-row[i], i)) for row in scores]
    return [list(range(protected)) + sorted(i + protected for i in best[h][: budgets[h]]) for h in range(num_heads)]


@pytest.mark.parametrize("seed", range(5))
def test_ada_snapkv_equals_a_plain_oracle(random_prompt, kept, seed):
    prompt = random_prompt(seed, num_layers=2)
    decision = prompt.run(built("ada-snapkv", window_size=8, kernel_size=1), 2 * 3 * 20, protected=4)
    expected = [oracle(prompt.weights(layer)[0][:, -8:, : prompt.end], 3, 60, 4) for layer in range(2)]
    assert kept(decision) == expected
    assert prompt.shown == [0, 1]


@pytest.mark.parametrize(("total", "protected"), [(72 * 9 + 1, 0), (35, 4), (-9, 0)])
def test_impossible_totals_are_refused(random_prompt, total, protected):
    with pytest.raises(ValueError, match="total must be between"):
        random_prompt().run(built("snapkv"), total, protected)
