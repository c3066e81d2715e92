"""Our policies keep what kvpress keeps, wherever the definitions coincide. Run by ``make test-peers`` only.

Not named test_*: it needs recordings that kvpress' own environment makes (record_kvpress.py).
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from peers.cases import KEPT_SHARES, make_cases
from peers.prompts import PROMPTS, Prompt
from peers.records import record_path
from peers.replay import Recording, differing_heads, only_rounding

NAMES = list(dict.fromkeys(case.name for share in KEPT_SHARES for case in make_cases(1000, share)))


@cache
def recording(prompt_name: str) -> Recording:
    if not record_path(prompt_name).is_file():
        pytest.exit("no recordings of kvpress: run `make test-peers`", returncode=2)
    return Recording(prompt_name)


@pytest.mark.parametrize("share", KEPT_SHARES)
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.name)
@pytest.mark.parametrize("name", NAMES)
def test_kept_positions(name: str, prompt: Prompt, share: float) -> None:
    record = recording(prompt.name)
    for case in make_cases(record.num_tokens, share):
        if case.name == name:
            assert not differing_heads(record, share, case).nonzero().tolist()


def masks(*heads: list[int]) -> torch.Tensor:
    return torch.tensor([heads], dtype=torch.bool)


def test_an_exchange_of_equal_scores_is_rounding_and_nothing_else_is() -> None:
    scores = torch.tensor([[[3.0, 2.0, 2.000001, 1.0], [3.0, 2.0, 1.9, 1.0]]])
    theirs = masks([1, 1, 0, 0], [1, 1, 0, 0])
    assert only_rounding(scores, masks([1, 0, 1, 0], [1, 0, 1, 0]), theirs).tolist() == [[True, False]]
    assert only_rounding(scores, masks([1, 1, 0, 0], [1, 0, 0, 0]), theirs).tolist() == [[True, False]]
    assert only_rounding(scores, masks([1, 1, 1, 0], [1, 0, 0, 0]), theirs).tolist() == [[True, True]]
    assert only_rounding(scores, masks([1, 1, 0, 1], [1, 0, 0, 0]), theirs).tolist() == [[False, False]]
