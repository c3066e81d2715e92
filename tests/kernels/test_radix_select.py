from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.references import kth_largest_reference, top_mask_reference
from helpers.tolerance import assert_same_bits
from kvevict_kernels.radix_select import kth_largest, largest_entries, top_mask, triton_impl

pytestmark = pytest.mark.usefixtures("poisoned_empty")

DTYPES = [torch.int16, torch.int32, torch.int64]


@pytest.fixture(autouse=True)
def _several_tiles_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that small rows have several tiles of several blocks, and two rows a round of launches."""
    tile(monkeypatch, block=16, max_tiles=4, num_rows=2)
    monkeypatch.setattr("kvevict_kernels.radix_select.KEYS_AT_ONCE", 128)
    monkeypatch.setattr("kvevict_kernels.radix_select.LONG_ROW", 50)


def tile(monkeypatch: pytest.MonkeyPatch, *, block: int, max_tiles: int, num_rows: int) -> None:
    monkeypatch.setattr(triton_impl, "KEY_BLOCK", block)
    monkeypatch.setattr(triton_impl, "MAX_TILES", max_tiles)
    monkeypatch.setattr(triton_impl, "HISTOGRAM_BYTES", num_rows * max_tiles * triton_impl.BINS * 4)


def random_keys(num_rows: int, n: int, dtype: torch.dtype, kind: str) -> Tensor:
    """Keys that differ in every byte, in a few values, or not at all; "extremes" holds the ends of the dtype."""
    limits = torch.iinfo(dtype)
    if kind == "equal":
        return torch.full((num_rows, n), -7, dtype=dtype)
    if kind == "wide":
        return torch.randint(limits.min, limits.max, (num_rows, n), dtype=dtype)
    extremes = [limits.min, limits.min + 1, -257, -1, 0, 1, 256, limits.max - 1, limits.max]
    values = torch.tensor(extremes if kind == "extremes" else [5, 6], dtype=dtype)
    return values[torch.randint(len(values), (num_rows, n))]


def check(keys: Tensor, counts: int | Tensor) -> None:
    assert_same_bits("mask", top_mask(keys, counts), top_mask_reference(keys, counts))
    assert_same_bits("threshold", kth_largest(keys, counts), kth_largest_reference(keys, counts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["wide", "few", "extremes", "equal"])
def test_rows_with_different_counts(device: str, dtype: torch.dtype, kind: str) -> None:
    n = 83  # three tiles of two blocks, the last one short
    counts = torch.tensor([0, 1, n // 3, n - 1, n])
    check(random_keys(5, n, dtype, kind).to(device), counts.to(device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 13, 39, 40])
def test_one_number_for_all_rows(device: str, dtype: torch.dtype, count: int) -> None:
    check(random_keys(2, 40, dtype, "few").to(device), count)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 65, 300])
def test_row_lengths(device: str, n: int) -> None:
    check(random_keys(1, n, torch.int32, "few").to(device), torch.tensor([(n + 1) // 2], device=device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tile_sizes_do_not_matter(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = random_keys(3, 90, dtype, "extremes").to(device)
    counts = torch.tensor([10, 45, 80], device=device)
    mask, threshold = top_mask(keys, counts), kth_largest(keys, counts)
    for block, max_tiles, num_rows in ((16, 4, 2), (32, 8, 3), (128, 2, 9)):  # the first: the same again
        tile(monkeypatch, block=block, max_tiles=max_tiles, num_rows=num_rows)
        assert_same_bits("mask", top_mask(keys, counts), mask)
        assert_same_bits("threshold", kth_largest(keys, counts), threshold)


def test_arguments_are_left_as_they_were(device: str) -> None:
    keys, counts = random_keys(2, 20, torch.int32, "wide").to(device), torch.tensor([3, 20], device=device)
    before = keys.clone(), counts.clone()
    top_mask(keys, counts)
    kth_largest(keys, counts)
    assert_same_bits("keys", keys, before[0])
    assert_same_bits("counts", counts, before[1])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_select_from(device: str, shape: tuple[int, int]) -> None:
    keys = torch.zeros(shape, dtype=torch.int64, device=device)
    counts = torch.zeros(shape[0], dtype=torch.int64, device=device)
    for none in (0, counts):
        assert_same_bits("mask", top_mask(keys, none), torch.zeros(shape, dtype=torch.bool))
    if shape[1]:
        assert_same_bits("threshold", kth_largest(keys, counts), torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("kind", ["wide", "few", "equal"])
def test_entries_of_all_runs_compete(device: str, dtype: torch.dtype, kind: str) -> None:
    indptr = torch.tensor([0, 0, 70, 71, 83, 150, 150], device=device)
    keys = random_keys(1, 150, dtype, kind).to(device)
    for count in (0, 1, 40, 149, 150):
        numbers, lens = largest_entries(keys[0], indptr.int() if count % 2 else indptr, count)
        want = top_mask_reference(keys, count)[0]
        assert numbers.tolist() == want.nonzero().flatten().tolist() and lens.dtype == torch.int32
        assert lens.tolist() == [int(part.sum()) for part in want.tensor_split(indptr.cpu()[1:-1])]


KEYS = torch.tensor([[4, 2, 2], [1, 1, 0]], dtype=torch.int32)
COUNTS = torch.tensor([1, 3])


@pytest.mark.parametrize("function", [top_mask, kth_largest])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((KEYS.float(), COUNTS), "keys: expected dtype int16 or int32 or int64, got float32"),
        ((KEYS[0], COUNTS), r"keys: expected shape \[any, any\], got \[3\]"),
        ((KEYS.T, COUNTS), "keys: expected a contiguous tensor"),
        ((KEYS.to("meta").new_zeros(1, 2**31), 1), "keys: expected at most 2147483647 keys in a row, got 2147483648"),
        ((KEYS, COUNTS.int()), "counts: expected dtype int64, got int32"),
        ((KEYS, COUNTS[:1]), r"counts: expected shape \[2\], got \[1\]"),
        ((KEYS, COUNTS.to("meta")), "counts: expected device cpu, got meta"),
        ((KEYS, COUNTS + 1), r"counts: expected indices in \[0, 4\), got 2 to 4"),
        ((KEYS, COUNTS - 2), r"counts: expected indices in \[0, 4\), got -1 to 1"),
        ((KEYS, 4), "counts: expected an int >= 0 and <= 3, got 4"),
        ((KEYS, -1), "counts: expected an int >= 0 and <= 3, got -1"),
        ((KEYS, 1.0), "counts: expected an int >= 0 and <= 3, got 1.0"),
        ((KEYS.to("meta"), 1), "device: expected cuda or cpu, got meta"),
    ],
)
def test_bad_arguments_are_named(function: object, args: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(*args)  # type: ignore[operator]


def test_a_row_without_keys_has_no_threshold() -> None:
    with pytest.raises(ValueError, match="keys: expected at least one key in a row, got n = 0"):
        kth_largest(KEYS[:, :0].contiguous(), 0)
