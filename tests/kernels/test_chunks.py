"""Keys are cut so that one request fills a device, and partials stay within what the host can reckon."""

from __future__ import annotations

import pytest
import torch

from helpers.gpu_kernels import DEVICES
from kvevict_kernels.device_limits import DeviceLimits
from kvevict_kernels.ragged_decode.chunks import (
    CHUNK_STEP,
    MAX_CHUNK,
    MIN_CHUNKS,
    bucket,
    extend_splits,
    max_chunks,
    span_chunk,
    suffix_splits,
)
from kvevict_kernels.ragged_decode.launch import sizes_on
from kvevict_kernels.ragged_decode.tile_table import (
    FAMILIES,
    HEAD_DIMS,
    KEYS,
    LATENTS,
    Tile,
    block_widths,
    family_of,
    tiles_for,
)

H200 = DEVICES[90]
ITEMS = 2 * H200.num_sms


@pytest.mark.parametrize(("heads", "per_head"), [(8, 6554), (8, 20_000), (2, 6554), (4, 3000), (2, 20_000)])
def test_one_long_span_gives_every_multiprocessor_work(heads: int, per_head: int) -> None:
    """At most two items for each, so that none waits for a second round, and more than one and a half on average."""
    chunk = span_chunk(heads * per_head, heads, ITEMS, 0)
    assert chunk % CHUNK_STEP == 0
    items = heads * -(-per_head // chunk)
    assert chunk in (MIN_CHUNKS[0], MAX_CHUNK) or 0.75 * ITEMS < items <= ITEMS


@pytest.mark.parametrize("num_tiles", [1, 2, 4, 8])
def test_sharers_of_one_long_span_leave_no_multiprocessor_idle(num_tiles: int) -> None:
    """32 to 256 requests of 4 q rows on 32k tokens at 20 %: rounds of one item for each multiprocessor, nearly full."""
    chunk = span_chunk(8 * 6554, 8, H200.num_sms, 1, num_tiles)
    items = 8 * -(-6554 // chunk) * num_tiles
    rounds = -(-items // H200.num_sms)
    assert items >= 0.85 * rounds * H200.num_sms
    assert chunk >= 3 * MIN_CHUNKS[1] or num_tiles == 1, "partials of more rows are written less often"


def test_chunks_stay_within_their_bounds() -> None:
    for entries in (0, 1, 100, 10_000, 10_000_000):
        for which, least in enumerate(MIN_CHUNKS):
            assert least <= span_chunk(entries, 8, ITEMS, which) <= MAX_CHUNK


def test_partials_of_an_uneven_span_are_bounded() -> None:
    """A run of ten times the average has no more chunks than one of twice the average, give or take one."""
    chunk = span_chunk(8 * 6554, 8, ITEMS, 0)
    cap = max_chunks(6554, chunk)
    for length in (1, 6554, 13_108, 65_540):
        longer = chunk * max(1, -(-length // (chunk * cap)))
        assert -(-length // longer) <= cap
    assert cap <= 2 * -(-6554 // chunk) + 1


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("heads", [1, 2, 8, 40])
def test_a_suffix_has_no_more_chunks_than_its_bound_says(heads: int, which: int) -> None:
    """The device's formula, written out."""
    lengths = torch.cat([torch.arange(1, 3000), torch.arange(3000, 200_000, 997)])
    even = (lengths * heads + ITEMS - 1) // ITEMS
    chunks = ((even + CHUNK_STEP - 1) // CHUNK_STEP * CHUNK_STEP).clamp(min=MIN_CHUNKS[which])
    splits = (lengths + chunks - 1) // chunks
    for length, count in zip(lengths.tolist(), splits.tolist(), strict=True):
        assert count <= suffix_splits(length, heads, ITEMS, which) <= suffix_splits(bucket(length), heads, ITEMS, which)


@pytest.mark.parametrize("new", [33, 64, 128, 256, 512])
def test_a_question_on_a_long_prefix_fills_the_device(new: int) -> None:
    """llama-8B: 8 KV heads, 4 q heads each, tiles of 128 rows, 132 multiprocessors."""
    tiles = 8 * -(-new * 4 // 128)
    splits = extend_splits(tiles, 6554, H200.num_sms)
    assert tiles * splits >= 0.9 * H200.num_sms
    assert 6554 / splits >= 256


def test_long_prefills_and_short_keys_are_not_split() -> None:
    assert extend_splits(8 * 64, 100_000, 132) == 1
    assert extend_splits(8, 200, 132) == 1


def test_a_bucket_holds_its_tokens_for_a_while() -> None:
    assert [bucket(n) for n in (1, 512, 513, 1024, 1025)] == [512, 512, 1024, 1024, 2048]


@pytest.mark.parametrize(
    ("arch", "shared_per_sm", "family"),
    [
        *((80, 167936, 80), (86, 102400, 89), (87, 167936, 80), (89, 102400, 89), (90, 233472, 90)),
        *((100, 233472, 100), (103, 233472, 100), (120, 102400, 89), (75, 65536, 89)),
    ],
)
def test_every_architecture_finds_its_tiles(arch: int, shared_per_sm: int, family: int) -> None:
    limits = DeviceLimits(arch=arch, num_sms=100, shared_per_sm=shared_per_sm)
    assert family_of(limits) == family
    assert tiles_for(limits, 80) == tiles_for(limits, 128)
    few, many, extend = tiles_for(limits, 80)
    assert (few.keys, many.keys, extend.keys) == KEYS[family, 128]
    assert (many.rows, many.warps) == ((extend.rows, extend.warps) if family in (89, 90) else (64, 4))
    with pytest.raises(ValueError, match="head_dim: expected at most 576, got 577"):
        tiles_for(limits, 577)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_of_latents_hold_two_steps_of_keys(family: int) -> None:
    """Queries and two steps of keys, in 16 bits, fit the shared memory of every family."""
    tiles = tiles_for(DEVICES[family], 576)
    assert [(tile.rows, tile.keys) for tile in tiles] == list(LATENTS[family])
    assert all((tile.rows + 2 * tile.keys) * 2 * 576 <= DEVICES[family].shared_per_block for tile in tiles)


def test_blocks_of_keys_and_values() -> None:
    assert block_widths(80, 80) == {"D": 80, "DV": 80, "BLOCK_D": 128, "BLOCK_ROT": 0}
    assert block_widths(8, 8)["BLOCK_D"] == 16
    assert block_widths(576, 512) == {"D": 576, "DV": 512, "BLOCK_D": 512, "BLOCK_ROT": 64}
    assert block_widths(48, 40) == {"D": 48, "DV": 40, "BLOCK_D": 64, "BLOCK_ROT": 16}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_windows_change_no_tiles_rows(family: int, head_dim: int) -> None:
    """Tables are planned by rows, before a layer's window is known."""
    plain, other = (tiles_for(DEVICES[family], head_dim, has_window=has_window) for has_window in (False, True))
    assert [tile.rows for tile in other] == [tile.rows for tile in plain]
    assert all(16 <= one.keys <= tile.keys for one, tile in zip(other, plain, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_float8_has_a_smaller_tile_on_sm_89(family: int, head_dim: int) -> None:
    """Where conversions take longer than reading; other tiles stay, and so do those of other architectures."""
    plain, fp8 = (tiles_for(DEVICES[family], head_dim, is_fp8=is_fp8) for is_fp8 in (False, True))
    is_smaller = (family, head_dim) == (89, 128)
    assert fp8 == ((plain[0], Tile(64, 32, warps=4), plain[2]) if is_smaller else plain)


@pytest.mark.parametrize(("family", "wide"), [(80, [16, 32, 32]), (89, [16, 32, 64]), (90, [16, 32, 64])])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_wide_rows_of_few_bits_have_smaller_tiles(family: int, wide: list[int], head_dim: int) -> None:
    """By them batches are planned (``sizes_on``) and launched."""
    limits = DeviceLimits(arch=family, num_sms=100, shared_per_sm=102400 if family == 89 else 233472)
    plain, few_bits = tiles_for(limits, head_dim), tiles_for(limits, head_dim, has_few_bits=True)
    assert [tile.rows for tile in few_bits] == (wide if head_dim == 256 else [tile.rows for tile in plain])


@pytest.mark.parametrize("arch", [80, 90])
def test_batches_are_planned_by_the_tiles_that_are_launched(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = DeviceLimits(arch=arch, num_sms=100, shared_per_sm=233472)
    monkeypatch.setattr("kvevict_kernels.ragged_decode.launch.limits_of", lambda device: limits)
    kinds = {"head_dim": 256, "has_few_bits": True}
    planned = sizes_on(torch.device("cpu"), num_layers=1, num_kv_heads=1, group_size=1, **kinds)
    assert (*planned.decode_rows, planned.extend_rows) == tuple(tile.rows for tile in tiles_for(limits, **kinds))


def test_resident_programs_follow_the_scarcest_resource() -> None:
    assert H200.programs_per_sm(registers=168, shared=72192, num_warps=4) == 3
    assert H200.programs_per_sm(registers=250, shared=1000, num_warps=4) == 2
    assert H200.programs_per_sm(registers=16, shared=0, num_warps=4) == 16
    assert H200.programs_per_sm(registers=255, shared=232448, num_warps=8) == 1
