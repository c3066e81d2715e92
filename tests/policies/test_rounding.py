from __future__ import annotations

from fractions import Fraction

import torch

from sgl_kvevict.policies.budgets import exact_fraction, largest_remainder, mix_with_uniform, round_shares


def mix(hits: list[int], weight: float) -> list[int]:
    tensor = torch.tensor([hits])
    return mix_with_uniform(tensor, tensor.sum(-1), exact_fraction(weight))[0].tolist()


def test_safeguard_values_of_both_readings() -> None:
    """specs/ada_kv.md 9.7."""
    hits = [250, 100, 40, 10]
    assert mix(hits, 0.2) == [130, 100, 88, 82]
    assert mix(hits, 0.8) == [220, 100, 52, 28]
    assert mix(hits, 0.0) == [100] * 4
    assert mix(hits, 1.0) == hits


def test_largest_remainder_keeps_the_sum() -> None:
    """specs/ada_kv.md 9.9."""
    assert mix([40, 10, 10, 4], 0.2) == [21, 15, 15, 13]
    assert mix([40, 10, 10, 4], 0.8) == [35, 11, 11, 7]
    assert sum(mix([2500, 1000, 400, 68], 0.8)) == 3968
    assert all(sum(mix([7, 3, 1], weight)) == 11 for weight in (0.0, 0.2, 0.37, 0.8, 1.0))


def test_decimals_are_exact() -> None:
    assert exact_fraction(0.2) == Fraction(1, 5)
    assert round_shares([Fraction(11, 3)] * 3, 11) == [4, 4, 3]
    assert round_shares([Fraction(5, 2), Fraction(5, 2), Fraction(1)], 6) == [3, 2, 1]


def test_float_shares_round_to_the_sum() -> None:
    shares = torch.tensor([[0.1 + 0.2, 1.7, 2.0 - 1e-13]], dtype=torch.float64)
    assert largest_remainder(shares, 1, torch.tensor([4])).tolist() == [[0, 2, 2]]
