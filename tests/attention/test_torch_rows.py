from __future__ import annotations

import pytest
import torch

from sgl_kvevict.attention.cpu.torch_rows import BLOCK, SUFFIX_ROOM, arrange_rows

ROOM = SUFFIX_ROOM


def test_a_long_head_shares_no_row_and_two_short_ones_share_one() -> None:
    rows = arrange_rows(torch.tensor([[10, 100, 20], [500, 30, 40]]), ROOM, num_threads=2)
    assert rows.units.tolist() == [[[1, 3], [2, 0]], [[0, 3], [2, 1]]]  # 3: empty place
    assert rows.widths.tolist() == [2 * ROOM + 112, 2 * ROOM + 512]
    assert rows.num_entries.tolist() == [2 * width for width in rows.widths.tolist()]


@pytest.mark.parametrize(
    ("lens", "num_threads"),
    [([[10, 100, 20]], 3), ([[100, 100, 100]], 2), ([[100, 100, 100, 100]], 4), ([[7]], 1), ([[0, 90]], 2)],
    ids=["a thread for each", "even, odd number", "even", "one head", "two threads"],
)
def test_each_head_has_its_row_where_pairs_take_longer(lens: list[list[int]], num_threads: int) -> None:
    rows = arrange_rows(torch.tensor(lens), ROOM, num_threads)
    assert rows.units.flatten().tolist() == list(range(len(lens[0])))
    assert rows.widths.tolist() == [-(-(ROOM + max(lens[0])) // BLOCK) * BLOCK]


@pytest.mark.parametrize("num_threads", [1, 2, 5, 64])
@pytest.mark.parametrize("num_units", [1, 2, 3, 8, 13])
def test_every_head_has_one_place_and_every_row_is_wide_enough(num_units: int, num_threads: int) -> None:
    lens = torch.randint(0, 400, (6, num_units), generator=torch.Generator().manual_seed(num_units))
    rows = arrange_rows(lens, ROOM, num_threads)
    units = rows.units.flatten(1).sort(dim=1).values
    assert (units[:, :num_units] == torch.arange(num_units)).all()
    assert (units[:, num_units:] == num_units).all()
    padded = torch.cat([lens, torch.zeros(6, 1, dtype=torch.int64)], dim=1)
    needed = padded.gather(1, rows.units.flatten(1)).view(rows.units.shape).sum(2) + rows.units.shape[2] * ROOM
    assert (needed.amax(1) <= rows.widths).all()
    assert (rows.widths - needed.amax(1) < BLOCK).all()
    assert (rows.widths % BLOCK == 0).all()
