from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from helpers.encoded import codes_of, steps_of
from helpers.tolerance import FLOAT32_NOISE, assert_same_bits
from kvevict_kernels.row_codec import (
    MAX_NUMBER,
    MIDDLE,
    REACH,
    RowCoding,
    RowStatistics,
    check_coding,
    decode_rows,
    encode_rows,
    normalised,
    read_rows,
    rotation,
    write_rows,
)
from kvevict_kernels.row_sizes import ROWS_PER_SLOT, row_bytes

HEAD_DIMS = [32, 64, 96, 128]
DTYPES = [torch.bfloat16, torch.float16]
ZEROS, ONES = torch.zeros(64), torch.ones(64)


def statistics(head_dim: int) -> tuple[Tensor, Tensor]:
    """Channels of very different sizes, as those of Qwen's keys."""
    return 20 * torch.randn(head_dim), torch.rand(head_dim).mul(6).sub(3).exp()


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 192, 256])
def test_the_rotation_is_its_own_inverse(head_dim: int) -> None:
    found = rotation(head_dim, torch.device("cpu"))
    assert found.dtype == torch.float32 and torch.equal(found, found.T)
    one = torch.eye(head_dim, dtype=torch.float64)
    assert (found.double() @ found.double() - one).abs().max() < FLOAT32_NOISE
    assert found is rotation(head_dim, torch.device("cpu"))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_off_by_half_a_step(head_dim: int, dtype: torch.dtype) -> None:
    """In the mean of a row, after the rotation; its largest numbers by a little more."""
    mean, scale = statistics(head_dim)
    x = (mean + scale * torch.randn(200, head_dim)).to(dtype)
    encoded = encode_rows(x, mean, scale)
    assert encoded.dtype == torch.uint8 and encoded.shape == (200, row_bytes(4, head_dim))
    error = ((decode_rows(encoded, mean, scale) - x.float()) / scale).square().mean(1).sqrt()
    assert (error <= 0.5 * steps_of(encoded)).all()
    assert error.square().mean().sqrt() < 0.12  # of numbers with a mean square of 1


def test_the_bytes_of_a_row() -> None:
    """Codes two by two, the lower half of a byte first; then the step."""
    codes = torch.randint(0, 16, (1, 64))
    codes[0, [5, 9]] = torch.tensor([0, 15])  # the largest code reaches a little less than the largest number
    turned = (codes - 7.5) * 0.25
    x = turned @ rotation(64, turned.device)
    (found,) = encode_rows(x, ZEROS, ONES).tolist()
    want = [int(codes[0, j]) | int(codes[0, j + 1]) << 4 for j in range(0, 64, 2)]
    assert found == [*want, *struct.pack("<f", 0.25)[2:]]
    assert torch.equal(decode_rows(torch.tensor([found], dtype=torch.uint8), ZEROS, ONES), x)


def test_the_step_is_the_one_that_comes_nearest() -> None:
    """The next ones of bfloat16 do not."""
    x = torch.randn(200, 64)
    encoded = encode_rows(x, ZEROS, ONES)
    steps = encoded[:, -2:].contiguous().view(torch.int16)

    def errors(shift: int) -> Tensor:
        shifted = torch.cat([encoded[:, :-2], (steps + shift).view(torch.uint8)], dim=1)
        return (decode_rows(shifted, ZEROS, ONES) - x).square().sum(1)

    assert (errors(0) <= torch.minimum(errors(1), errors(-1)) * (1 + 20 * FLOAT32_NOISE)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", [16, 4])
def test_rows_fill_their_head_slots(bits: int, head_dim: int, dtype: torch.dtype) -> None:
    """Every row has bytes of its own, in its head slot, one after the other, and a step; others keep theirs."""
    arena = torch.zeros(2, 3, 2, head_dim, dtype=dtype)
    per_slot = ROWS_PER_SLOT[bits]
    assert per_slot == {16: 1, 4: 4}[bits]
    steps = torch.zeros(12 * per_slot, dtype=torch.bfloat16) if bits == 4 else None
    stored = arena.view(-1).view(torch.uint8)
    width = len(stored) // (12 * per_slot)
    for row in torch.randperm(12 * per_slot).tolist():
        before, steps_before = stored.clone(), None if steps is None else steps.view(torch.int16).clone()
        content = torch.randint(1, 256, (1, row_bytes(bits, head_dim)), dtype=torch.uint8)
        write_rows(arena, torch.tensor([row], dtype=torch.int32), content, steps)
        before[row * width : (row + 1) * width] = content[0, :width]
        assert torch.equal(stored, before)
        if steps is not None and steps_before is not None:
            steps_before[row : row + 1] = content[0, width:].view(torch.int16)
            assert torch.equal(steps.view(torch.int16), steps_before)
        assert torch.equal(read_rows(arena, torch.tensor([row]), steps), content)
    assert stored.all()


def test_means_come_back() -> None:
    """A row without a size has a step of 0."""
    mean, scale = statistics(64)
    encoded = encode_rows(mean[None].expand(3, -1), mean, scale)
    assert steps_of(encoded).tolist() == [0, 0, 0]
    assert torch.equal(decode_rows(encoded, mean, scale), mean.expand(3, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whatever_is_written_is_read_as_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.stack(
        [
            torch.full((32,), largest),
            torch.full((32,), -largest),
            torch.linspace(-1, 1, 32).sign() * largest,
            torch.full((32,), torch.finfo(dtype).tiny),
            torch.full((32,), torch.finfo(dtype).smallest_normal / 4),
            torch.linspace(-1e-7, 1e-7, 32),
            torch.cat([torch.zeros(31), torch.tensor([largest])]),
            torch.cat([torch.zeros(30), torch.tensor([torch.inf, -torch.inf])]),
            torch.full((32,), torch.nan),
        ]
    ).to(dtype)
    for scale in (1e-3, 1.0, 100.0):
        known = torch.full((32,), 3.0), torch.full((32,), scale)
        encoded = encode_rows(x, *known)
        decoded = decode_rows(encoded, *known)
        assert decoded.isfinite().all()
        saturated = ((x.float() - 3) / scale).nan_to_num(0.0).clamp(-MAX_NUMBER, MAX_NUMBER)
        error = ((decoded - 3) / scale - saturated).square().mean(1).sqrt()
        largest_turned = normalised(x, *known).abs().amax(1)
        # Half a step, of which the largest code reaches 7.5, or what this code leaves out of the largest number.
        assert (error <= max(0.5 * REACH / MIDDLE, 1 - REACH) * 1.01 * largest_turned).all()
        assert torch.equal(decoded[-1], known[0])


def test_large_numbers_saturate() -> None:
    x = torch.tensor([[1e6, -1e6, 0.0, 70000.0] * 16])
    want = torch.tensor([[MAX_NUMBER, -MAX_NUMBER, 0.0, MAX_NUMBER] * 16])
    assert torch.equal(encode_rows(x, ZEROS, ONES), encode_rows(want, ZEROS, ONES))


def test_a_coding_reads_what_was_written() -> None:
    """By the statistics of each row's run."""
    arenas = [torch.randn(2, 5, 3, 64).bfloat16() for _ in "kv"]
    known = [torch.stack([torch.stack(statistics(64)) for _ in range(6)]).view(2, 3, 2, 64) for _ in "kv"]
    coding = RowCoding.of(arenas[0], RowStatistics(*(x.contiguous() for both in known for x in both.unbind(2))))
    rows, runs = torch.tensor([7, 0, 119], dtype=torch.int32), torch.tensor([4, 0, 5], dtype=torch.int32)
    for is_v, arena in enumerate(arenas):
        mean, scale = known[is_v].flatten(0, 1)[runs.long()].unbind(1)
        encoded = encode_rows(mean + scale * torch.randn(3, 64), mean, scale)
        write_rows(arena, rows, encoded, coding.steps(is_v))
        want = decode_rows(encoded, mean, scale)
        assert_same_bits("numbers", coding.load(arena, rows, runs, is_v=bool(is_v)), want)
        assert codes_of(encoded).max() == 15


def test_the_table_has_all_that_kernels_read() -> None:
    """And follows other statistics."""
    given = [torch.randn(2, 3, 32).abs() for _ in range(4)]
    found = RowStatistics(*(x.clone() for x in given))
    table = found.table
    others = [torch.randn(2, 3, 32).abs() for _ in range(4)]
    for want in (given, others):
        found.assign(RowStatistics(*want))
        assert found.table is table and table.shape == (32 + 4 * 6, 32)
        assert torch.equal(table[:32], rotation(32, table.device))
        for place, of_all in enumerate(want):
            assert torch.equal(table[32 + place :: 4], of_all.flatten(0, 1))


ONE = torch.ones(2, 3, 32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((ONE, ONE, ONE, ONE.double()), "v_scale: expected dtype float32, got float64"),
        ((ONE, ONE[:1], ONE, ONE), r"k_scale: expected shape \[2, 3, 32\], got \[1, 3, 32\]"),
        ((ONE, ONE, ONE, 0 * ONE), "v_scale: expected numbers > 0, got 0.0"),
        ((ONE, ONE, ONE / 0, ONE), "v_mean: expected finite numbers"),
    ],
)
def test_bad_statistics_are_named(given: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowStatistics(*given)


def test_a_coding_that_does_not_fit_is_refused() -> None:
    arena, known = torch.zeros(2, 5, 3, 32).bfloat16(), RowStatistics(ONE, ONE, ONE, ONE)
    good = RowCoding.of(arena, known)
    check_coding(arena, good)
    with pytest.raises(ValueError, match=r"v_steps: expected shape \[120\], got \[119\]"):
        check_coding(arena, RowCoding(known, good.k_steps, good.v_steps[:-1]))
    with pytest.raises(ValueError, match="k_steps: expected dtype bfloat16"):
        check_coding(arena, RowCoding(known, good.k_steps.float(), good.v_steps))
    with pytest.raises(ValueError, match=r"statistics: expected shape \[2, 4, 32\]"):
        check_coding(torch.zeros(2, 5, 4, 32).bfloat16(), good)
    with pytest.raises(ValueError, match="head_dim that is a multiple of 32, got bfloat16 and 48"):
        RowCoding.of(torch.zeros(2, 5, 3, 48).bfloat16(), known)
    with pytest.raises(ValueError, match=r"rows of 4 bits need a pool of bfloat16 or float16 .*, got float32 and 32"):
        check_coding(torch.zeros(2, 5, 3, 32), good)
