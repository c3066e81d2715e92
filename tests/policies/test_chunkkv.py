"""specs/chunkkv.md section 11."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from helpers.decisions import Run, built
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies import RangeScores
from sgl_kvevict.policies.methods.chunkkv import ChunkKV, ChunkSelector

TOKENS = [5, 0, 0, 0, 1, 1, 1, 1, 0, 0, 3, 0, 2, 2, 2, 0, 3, 3, 3, 3]


def choose(tokens: Any, window: int, chunk: int, budget: int, **options: Any) -> list[int]:
    """Kept positions of one head: the window inside the range and paid for, as in the paper."""
    values = torch.as_tensor(np.asarray(tokens), dtype=torch.float32)[None, None]
    if budget >= values.shape[-1]:
        return list(range(values.shape[-1]))
    scores = RangeScores(values, None, None, 0, window)
    kept = ChunkSelector(ChunkKV(chunk_length=chunk, **options)).select(scores, torch.tensor([[budget - window]]))
    return kept[0, 0].nonzero().flatten().tolist()


def ranges(*pairs: tuple[int, int]) -> list[int]:
    return [i for first, last in pairs for i in range(first, last + 1)]


@pytest.mark.parametrize(
    ("budget", "chunk", "expected"),
    [
        (8, 4, ranges((12, 19))),
        (10, 4, ranges((0, 1), (12, 19))),
        (12, 4, ranges((0, 3), (12, 19))),
        (14, 4, ranges((0, 5), (12, 19))),
        (16, 4, ranges((0, 7), (12, 19))),
        (20, 4, ranges((0, 19))),
        (14, 3, [0, 1, 2, 3, *ranges((9, 14), (16, 19))]),
        (14, 2, [0, 1, 4, 5, 6, 7, *ranges((10, 13), (16, 19))]),
    ],
)
def test_worked_selection(budget, chunk, expected):
    """T1, exact mode."""
    assert choose(TOKENS, 4, chunk, budget) == expected


def one_head(from_weights: Run, keys: list[float], window: int) -> Any:
    """T2 and T3: one-dimensional keys and queries of 1; every query sees all keys but the causal ones."""
    length = len(keys)
    rows = torch.zeros(1, window, length, dtype=torch.float64)
    for query in range(window):
        seen = length - window + query + 1
        rows[0, query, :seen] = torch.tensor(keys[:seen], dtype=torch.float64).softmax(-1)
    return from_weights([rows], tail=0)


def test_softmax_scores(from_weights, kept):
    """T2."""
    prompt = one_head(from_weights, [math.log(m) for m in (4, 1, 1, 2, 1, 1, 2, 12)], 2)
    policy = built("chunkkv", window_size=2, chunk_length=2)
    scores = policy.scorer.score(prompt.show(0)).values * 2  # a sum in the paper, a mean here
    expected = torch.tensor([[0.5, 0.125, 0.125, 0.25, 0.125, 0.125, 0.25, 0.5]])
    torch.testing.assert_close(scores, expected)
    assert float(scores.sum()) == pytest.approx(2, abs=1e-5)
    assert kept(prompt.run(policy, 4)) == [[[0, 1, 6, 7]]]
    assert kept(prompt.run(policy, 5)) == [[[0, 1, 2, 6, 7]]]


def test_one_very_negative_logit_does_not_cost_its_chunk(make_prompt, kept):
    """T3, softmax."""
    keys = torch.tensor([5.0, -10, 0, 0, 1]).view(5, 1, 1)
    prompt = make_prompt([keys], [torch.ones(1, 1, 1)], tail=0, window=1)
    assert kept(prompt.run(built("chunkkv", window_size=1, chunk_length=2), 3)) == [[[0, 1, 4]]]


def test_a_cold_window_costs_the_weakest_chunks():
    """T4, exact mode."""
    tokens = np.random.default_rng(1).random(320)
    tokens[-32:] = 0
    assert choose(tokens, 32, 8, 128)[-33] == 239


@pytest.mark.parametrize("chunk", [1, 3, 7, 10])
def test_structure(chunk):
    """T5: exact sizes, ascending, window present, one partial chunk at most (its leading part), nested sets."""
    tokens = np.random.default_rng(2).random(500)
    smaller: set[int] = set()
    for budget in range(33, 500, 41):
        kept = choose(tokens, 32, chunk, budget)
        assert len(kept) == budget and kept == sorted(set(kept)) and kept[-32:] == list(range(468, 500))
        assert smaller <= set(kept)
        smaller = set(kept)
        partial = 0
        for begin in range(0, 468, chunk):
            inside = [t for t in kept if begin <= t < min(begin + chunk, 468)]
            assert inside == list(range(begin, begin + len(inside)))
            partial += 0 < len(inside) < min(chunk, 468 - begin)
        assert partial <= 1


def test_chunks_of_one_are_top_k_and_one_chunk_is_a_prefix():
    """T6."""
    tokens = np.random.default_rng(3).random(60)
    best = np.argsort(-tokens[:52].astype(np.float32), kind="stable")[:12]
    assert choose(tokens, 8, 1, 20) == sorted(best.tolist()) + list(range(52, 60))
    assert choose(tokens, 8, 52, 20) == list(range(12)) + list(range(52, 60))


def test_tail_chunk_and_ties():
    """T9: a short last chunk is at a disadvantage as a sum, not as a mean; ties are kept from the left."""
    assert choose(np.full(103, 1 / 103), 3, 10, 43) == ranges((0, 39), (100, 102))
    tokens = np.full(108, 1.0)
    tokens[100:105] = 1.5
    assert 100 not in choose(tokens, 3, 10, 53)
    assert 100 in choose(tokens, 3, 10, 53, chunk_score="mean")


def test_shared_heads(random_prompt, kept):
    """The kvpress variant: one list of chunks for a layer."""
    decision = random_prompt().run(built("chunkkv", share_heads=True, window_size=8, chunk_length=5), 9 * 22)
    for layer in kept(decision):
        assert layer[0] == layer[1] == layer[2]


@pytest.mark.parametrize(("num_layers", "reuse", "scored"), [(32, 2, 16), (32, 5, 7), (32, 32, 1), (28, 3, 10)])
def test_reused_layers_are_not_looked_at(random_prompt, kept, num_layers, reuse, scored):
    """T11."""
    prompt = random_prompt(num_layers=num_layers, length=40)
    options = {"window_size": 8, "chunk_length": 3}
    reused = kept(prompt.run(built("chunkkv", reuse_layers=reuse, **options), num_layers * 3 * 11, protected=2))
    assert prompt.shown == [layer for layer in range(num_layers) if layer % reuse == 0]
    assert len(prompt.shown) == scored
    plain = kept(prompt.run(built("chunkkv", **options), num_layers * 3 * 11, protected=2))
    assert all(reused[layer] == plain[layer // reuse * reuse] for layer in range(num_layers))


def test_reuse_needs_equal_layers(random_prompt):
    assert built("chunkkv", reuse_layers=2, budget_rule="adaptive").reuse_layers == 2
    for rule in ("pyramid", "adaptive-pyramid", "all-layers"):
        with pytest.raises(ConfigError, match="reuse_layers=2 needs the same budget in every layer"):
            built("chunkkv", reuse_layers=2, budget_rule=rule)
    with pytest.raises(ValueError, match="multiple of the layers"):
        random_prompt().run(built("chunkkv", reuse_layers=2), 100)


def test_chunks_with_adaptive_budgets(random_prompt, kept):
    decision = random_prompt().run(
        built("chunkkv", budget_rule="adaptive", window_size=8, chunk_length=4), 9 * 20, protected=3
    )
    lens = decision.selection.keep_lens
    assert lens.sum(1).tolist() == [60] * 3 and lens[0].unique().numel() > 1
    assert all(run[:3] == [0, 1, 2] for layer in kept(decision) for run in layer)
