"""Parts of an own policy that return something wrong: an error names policy, part, and what was got and allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import LayerView, Policy, Scorer, TokenScores
from sgl_kvevict.policies.budgets import LayeredBudget, UniformHeads, UniformLayers
from sgl_kvevict.policies.parts import RangeScores
from sgl_kvevict.policies.selectors import TopKSelector

GEOMETRY = KVGeometry(num_layers=3, num_qo_heads=2, num_kv_heads=2, head_dim=4, num_token_slots=41)


@dataclass(frozen=True)
class Scores(Scorer):
    """Scores of layer 1 are what ``make`` makes of sound ones."""

    make: Callable[[torch.Tensor], TokenScores]

    def score(self, view: LayerView) -> TokenScores:
        sound = torch.arange(80.0).view(2, 40)
        return self.make(sound) if view.layer == 1 else TokenScores(sound, sound, sound[0])


class ShortBudget(LayeredBudget):
    def allocate(self, scores: RangeScores, total: int) -> torch.Tensor:
        return super().allocate(scores, total)[:, :1]


class Numbers(TopKSelector):
    def select(self, scores: RangeScores, keep_lens: torch.Tensor) -> torch.Tensor:
        return super().select(scores, keep_lens).float()


def order(scorer: Scorer, allocator: type = LayeredBudget, selector: type = TopKSelector) -> None:
    policy = Policy("mine", scorer, allocator(UniformLayers(), UniformHeads()), selector())
    rows, slots = torch.zeros(41, 2, 4), torch.arange(40)
    policy.order(lambda layer: LayerView(layer, 0, rows, rows, slots, 0.5), GEOMETRY, 60, 2).check()


def sound(scores: torch.Tensor) -> TokenScores:
    return TokenScores(scores, scores, scores[0])


SHAPES = {
    "one token short": (lambda x: TokenScores(x[:, 1:], x, x[0]), r"values of Scores, layer 1: .*\(2, 39\).*\(2, 40\)"),
    "one head short": (lambda x: TokenScores(x[:1], x, x[0]), r"values of Scores, layer 1: .*\(1, 40\).*\(2, 40\)"),
    "flat": (lambda x: TokenScores(x.flatten(), x, x[0]), r"values of Scores, layer 1: .*\(80,\).*\(2, 40\)"),
    "float16": (lambda x: TokenScores(x.half(), x, x[0]), r"values of Scores, layer 1: .*float16; allowed: .*float32"),
    "tie_break": (lambda x: TokenScores(x, x[:, 1:], x[0]), r"tie_break of Scores, layer 1: .*\(2, 39\).*\(2, 40\)"),
    "importance": (lambda x: TokenScores(x, x, x[0, 1:]), r"importance of Scores, layer 1: .*\(39,\).*\(40,\)"),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_scores_of_another_shape_or_dtype(kind: str) -> None:
    make, message = SHAPES[kind]
    with pytest.raises(ValueError, match=f"^policy 'mine': {message}"):
        order(Scores(make))


@pytest.mark.parametrize("which", ["values", "tie_break", "importance"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_no_finite_numbers(which: str, wrong: float) -> None:
    def make(scores: torch.Tensor) -> TokenScores:
        fields = {"values": scores.clone(), "tie_break": scores.clone(), "importance": scores[0].clone()}
        fields[which][..., 7:10] = wrong
        return TokenScores(**fields)

    count = 3 if which == "importance" else 6
    with pytest.raises(
        ValueError, match=rf"^policy 'mine': {count} scores of a range of \(3, 2, 40\) .* finite numbers"
    ):
        order(Scores(make))


def test_budgets_and_choices_of_another_shape_or_dtype() -> None:
    with pytest.raises(ValueError, match=r"budgets of ShortBudget: .*\(3, 1\).*allowed: \(3, 2\)"):
        order(Scores(sound), ShortBudget)
    with pytest.raises(ValueError, match=r"choice of Numbers: .*float32; allowed: .*bool"):
        order(Scores(sound), selector=Numbers)
