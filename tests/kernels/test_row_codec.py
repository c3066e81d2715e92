from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from helpers.tolerance import FLOAT32_NOISE, assert_same_bits
from kvevict_kernels.row_codec import (
    RowStatistics,
    decode_rows,
    encode_rows,
    load_rows,
    read_rows,
    row_bytes,
    rows_per_slot,
    write_rows,
)

HEAD_DIMS = [32, 64, 96, 128]
BITS = [8, 4]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def statistics(head_dim: int) -> tuple[Tensor, Tensor]:
    """Channels of very different sizes, as those of Qwen's keys."""
    return 20 * torch.randn(head_dim), torch.rand(head_dim).mul(6).sub(3).exp()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_four_bits_are_off_by_half_a_step(head_dim: int, dtype: torch.dtype) -> None:
    mean, deviation = statistics(head_dim)
    x = (mean + deviation * torch.randn(200, head_dim)).to(dtype)
    encoded = encode_rows(x, mean, deviation, 4)
    assert encoded.dtype == torch.uint8 and encoded.shape == (200, row_bytes(4, head_dim, dtype.itemsize))
    error = ((decode_rows(encoded, mean, deviation, 4) - x.float()) / deviation).abs()
    numbers = ((x.float() - mean) / deviation).unflatten(1, (-1, 32))
    step = (numbers.amax(2) - numbers.amin(2)) / 15
    # float16 rounds the step, of which there are 15, and the minimum
    rounding = 2.0**-11 * (15 * step + numbers.amin(2).abs())
    allowed = (0.5 * step + rounding)[..., None] + 20 * FLOAT32_NOISE * (x.float() / deviation).unflatten(
        1, (-1, 32)
    ).abs()
    assert (error.unflatten(1, (-1, 32)) <= allowed).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eight_bits_are_off_by_a_sixteenth(head_dim: int, dtype: torch.dtype) -> None:
    mean, deviation = statistics(head_dim)
    x = (mean + deviation * torch.randn(200, head_dim)).to(dtype)
    encoded = encode_rows(x, mean, deviation, 8)
    assert encoded.dtype == torch.uint8 and encoded.shape == (200, head_dim)
    numbers = (x.float() - mean) / deviation
    error = ((decode_rows(encoded, mean, deviation, 8) - x.float()) / deviation).abs()
    allowed = (numbers.abs() / 16).clamp_min(2.0**-10) + 20 * FLOAT32_NOISE * (x.float() / deviation).abs()
    assert (error <= allowed).all()


def test_the_bytes_of_a_row_of_four_bits() -> None:
    """Numbers ``j`` and ``j + 16`` of a group share a byte; then scale and minimum of every group."""
    codes = torch.randint(0, 16, (64,))
    codes[[0, 40]], codes[[9, 63]] = 0, 15  # both groups have all of their range
    x = torch.cat([0.5 * codes[:32] - 2, 0.25 * codes[32:] + 1])[None]
    (found,) = encode_rows(x, torch.zeros(64), torch.ones(64), 4).tolist()
    want = [int(codes[g + j]) | int(codes[g + j + 16]) << 4 for g in (0, 32) for j in range(16)]
    assert found == [*want, *struct.pack("<4e", 0.5, -2, 0.25, 1)]
    assert torch.equal(decode_rows(torch.tensor([found], dtype=torch.uint8), torch.zeros(64), torch.ones(64), 4), x)


def test_the_bytes_of_a_row_of_eight_bits() -> None:
    x = torch.tensor([0.0, 1.0, -1.0, 448.0, -1e9, 2.0**-9, 1.0625, 0.9] * 4)[None]
    found = encode_rows(x, torch.zeros(32), torch.ones(32), 8)
    assert found.tolist() == [[0, 0x38, 0xB8, 0x7E, 0xFE, 0x01, 0x38, 0x36] * 4]


def test_all_bytes_of_eight_bits_decode_by_their_bits() -> None:
    """Exponent and fraction are those of a float16, shifted; times 256."""
    every = torch.tensor([[b for b in range(256) if b & 127 != 127]], dtype=torch.uint8)
    half = ((every.int() & 0x80) << 8 | (every.int() & 0x7F) << 7).to(torch.uint16).view(torch.float16)
    one = torch.ones(every.shape[1])
    assert torch.equal(256 * half.float(), decode_rows(every, 0 * one, one, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", [16, *BITS])
def test_rows_fill_their_head_slots(bits: int, head_dim: int, dtype: torch.dtype) -> None:
    """Every row has bytes of its own, in its head slot, at the places of the definition; others keep theirs."""
    arena = torch.zeros(2, 3, 2, head_dim, dtype=dtype)
    itemsize = dtype.itemsize
    per_slot = rows_per_slot(bits, itemsize)
    assert per_slot == {(16, 2): 1, (8, 2): 2, (4, 2): 3, (16, 4): 1, (8, 4): 4, (4, 4): 6}[bits, itemsize]
    num_bytes = row_bytes(bits, head_dim, itemsize)
    taken = torch.zeros(12, head_dim * itemsize, dtype=torch.int32)
    stored = arena.view(-1, head_dim).view(torch.uint8)
    for row in torch.randperm(12 * per_slot).tolist():
        before = stored.clone()
        content = torch.randint(1, 256, (1, num_bytes), dtype=torch.uint8)
        write_rows(arena, torch.tensor([row], dtype=torch.int32), bits, content)
        places = [
            place for start, count in _places(bits, row % per_slot, head_dim) for place in range(start, start + count)
        ]
        if bits == 16:
            places = list(range(num_bytes))
        before[row // per_slot, places] = content[0]
        assert torch.equal(stored, before)
        taken[row // per_slot, places] += 1
        assert torch.equal(read_rows(arena, torch.tensor([row]), bits), content)
    assert taken.max() == 1


def _places(bits: int, part: int, head_dim: int) -> list[tuple[int, int]]:
    """First byte and bytes of codes, and of scales and minima, in a head slot."""
    if bits != 4:
        return [(part * head_dim, head_dim)]
    block, own = 2 * head_dim * (part // 3), part % 3
    header = head_dim // 8
    return [(block + own * head_dim // 2, head_dim // 2), (block + 3 * head_dim // 2 + own * header, header)]


@pytest.mark.parametrize("bits", BITS)
def test_equal_numbers_come_back(bits: int) -> None:
    """A group without a range has a scale of 0; its minimum is rounded to float16."""
    mean, deviation = torch.full((64,), 2.0), torch.full((64,), 4.0)
    x = torch.tensor([-2.0, 0.0, 2.0, 14.0])[:, None].expand(-1, 64)
    assert torch.equal(decode_rows(encode_rows(x, mean, deviation, bits), mean, deviation, bits), x)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whatever_is_finite_stays_finite(bits: int, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.stack(
        [
            torch.full((32,), largest),
            torch.full((32,), -largest),
            torch.linspace(-1, 1, 32).sign() * largest,
            torch.full((32,), torch.finfo(dtype).tiny),
            torch.linspace(-1e-7, 1e-7, 32),
            torch.cat([torch.zeros(31), torch.tensor([largest])]),
        ]
    ).to(dtype)
    for deviation in (1e-3, 1.0, 100.0):
        statistics = torch.full((32,), 3.0), torch.full((32,), deviation)
        decoded = decode_rows(encode_rows(x, *statistics, bits), *statistics, bits)
        assert decoded.isfinite().all()
        assert decoded[0].min() > 0.9 * min(largest, (448 if bits == 8 else 65504) * deviation)


def test_saturated_rows_keep_order_and_sign() -> None:
    x = torch.tensor([[1e6, -1e6, 0.0, 70000.0] * 8])
    decoded = decode_rows(encode_rows(x, torch.zeros(32), torch.ones(32), 4), torch.zeros(32), torch.ones(32), 4)
    assert decoded[0, :4].tolist() == pytest.approx([65504, -65504, 0, 65504], abs=4400)
    (decoded,) = decode_rows(encode_rows(x, torch.zeros(32), torch.ones(32), 8), torch.zeros(32), torch.ones(32), 8)
    assert decoded[:4].tolist() == [448, -448, 0, 448]


@pytest.mark.parametrize("bits", [16, *BITS])
def test_load_reads_what_was_written(bits: int) -> None:
    arena = torch.randn(2, 5, 2, 64).bfloat16()
    mean, deviation = statistics(64)
    rows = torch.tensor([7, 0, 19], dtype=torch.int32)
    x = (mean + deviation * torch.randn(3, 64)).bfloat16()
    encoded = x.view(torch.uint8) if bits == 16 else encode_rows(x, mean, deviation, bits)
    write_rows(arena, rows, bits, encoded)
    want = x.float() if bits == 16 else decode_rows(encoded, mean, deviation, bits)
    assert_same_bits("float32", load_rows(arena, rows, bits, (mean, deviation)), want)
    assert_same_bits("bfloat16", load_rows(arena, rows, bits, (mean, deviation), torch.bfloat16), want.bfloat16())


ONES = torch.ones(2, 3, 32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((ONES, ONES, ONES, ONES.double()), "v_scale: expected dtype float32, got float64"),
        ((ONES, ONES[:1], ONES, ONES), r"k_scale: expected shape \[2, 3, 32\], got \[1, 3, 32\]"),
        ((ONES, ONES, ONES, 0 * ONES), "v_scale: expected numbers > 0, got 0.0"),
        ((ONES, ONES, ONES / 0, ONES), "v_mean: expected finite numbers"),
    ],
)
def test_bad_statistics_are_named(given: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowStatistics(*given)
