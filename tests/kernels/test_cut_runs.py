from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.references import cut_runs_reference
from helpers.tolerance import assert_same_bits
from kvevict_kernels.cut_runs import cut_runs

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def runs(num_runs: int, longest: int, device: str) -> tuple[Tensor, Tensor]:
    """Ascending positions in [20, 120), runs of 0 to ``longest`` entries."""
    lens = torch.randint(0, longest + 1, (num_runs,))
    parts = [torch.randperm(100)[:length].sort().values + 20 for length in lens.tolist()]
    positions = torch.cat([torch.empty(0, dtype=torch.int64), *parts]).int()
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]).int()
    return positions.to(device), indptr.to(device)


@pytest.mark.parametrize(("num_runs", "longest"), [(1, 1), (6, 40), (70, 100), (5, 0)])
@pytest.mark.parametrize(("start", "end"), [(0, 200), (20, 120), (50, 90), (20, 21), (70, 70), (121, 500), (0, 20)])
def test_matches_reference(device: str, num_runs: int, longest: int, start: int, end: int) -> None:
    positions, indptr = runs(num_runs, longest, device)
    starts, lens = cut_runs(positions, indptr, start, end)
    want_starts, want_lens = cut_runs_reference(positions, indptr, start, end)
    assert_same_bits("starts", starts, want_starts)
    assert_same_bits("lens", lens, want_lens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.zeros(2)}, "positions: expected dtype int32"),
        ({"indptr": torch.zeros(1, 2, dtype=torch.int32)}, r"indptr: expected shape \[any\]"),
        ({"start": -1}, "start: expected an int >= 0, got -1"),
        ({"end": 2}, "end: expected an int >= 3, got 2"),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    arguments = {"positions": torch.zeros(2, dtype=torch.int32), "indptr": torch.tensor([0, 2]).int()}
    with pytest.raises(ValueError, match=message):
        cut_runs(**(arguments | {"start": 3, "end": 9} | change))  # type: ignore[arg-type]
