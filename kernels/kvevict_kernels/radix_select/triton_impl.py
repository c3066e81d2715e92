"""radix_select on the device: the threshold of a row is found digit by digit, in base 256, from the top.

A row is cut into tiles. For each digit, every tile counts its keys that agree with the threshold's digits so far, by
their next digit; then one program per row adds up the tiles and picks the digit. After the last digit the counts at the
threshold are the tiles' numbers of ties, from which each tile marks its share of them.

Keys are read as unsigned integers with the sign bit flipped, which keeps their order; shifts then bring in zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KEY_BLOCK = 2048
"""Keys that a program holds at once; a tile is one or more such blocks."""
MAX_TILES = 256
"""Tiles per row, at most; a power of two. One program adds up all of them, and a single row still fills a device."""
TILE_BLOCK = 32
NUM_WARPS = 8
"""Twice the default: with fewer threads a block of 8-byte keys takes so many registers that few programs fit."""
HISTOGRAM_BYTES = 64 * 2**20
"""Limit of the scratch (at most 256 KiB per row); further rows go to the next launches."""
BINS = 256
ROWS = ("keys_ptr", "prefix_ptr", "threshold_ptr", "remaining_ptr", "histograms_ptr", "mask_ptr")
"""Pointers not specialised on alignment, which varies with the row length and would cause recompilation."""
UNSIGNED = {torch.int32: torch.uint32, torch.int64: torch.uint64}


@triton.jit(do_not_specialize=["n", "num_tiles", "tile_keys", "shift"], do_not_specialize_on_alignment=list(ROWS))
def _histogram_kernel(
    keys_ptr,  # [num_rows, n] uint32 or uint64
    prefix_ptr,  # [num_rows] dtype of keys: digits of the threshold so far
    histograms_ptr,  # [num_rows, num_tiles, BINS] int32
    n,
    num_tiles,
    tile_keys,  # a multiple of BLOCK
    shift,  # bits below the digit
    SIGN: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the keys of a tile that share the prefix, by the next digit."""
    tile = tl.program_id(0).to(tl.int64)
    row = tile // num_tiles
    begin = tile % num_tiles * tile_keys
    prefix = tl.load(prefix_ptr + row)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for start in range(begin, tl.minimum(begin + tile_keys, n), BLOCK):
        i_key = start + tl.arange(0, BLOCK)
        m_key = i_key < n
        digits = (tl.load(keys_ptr + row * n + i_key, mask=m_key, other=0) ^ SIGN) >> shift
        m_key &= digits // BINS == prefix
        counts += tl.histogram((digits % BINS).to(tl.int32), BINS, mask=m_key)
    tl.store(histograms_ptr + tile * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=list(ROWS))
def _pick_kernel(
    histograms_ptr,  # [num_rows, num_tiles, BINS] int32
    prefix_ptr,  # [num_rows] uint32 or uint64, updated
    remaining_ptr,  # [num_rows] int64, how many to take of the keys that share the prefix, updated
    num_tiles,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Append the digit of the ``remaining``-th key from the top; a count of 0 takes the first key and stays 0."""
    row = tl.program_id(0).to(tl.int64)
    o_bin = tl.arange(0, BINS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, num_tiles, BLOCK):
        i_tile = start + tl.arange(0, BLOCK)
        p_tile = histograms_ptr + (row * num_tiles + i_tile)[:, None] * BINS + o_bin[None, :]
        counts += tl.sum(tl.load(p_tile, mask=(i_tile < num_tiles)[:, None], other=0), 0)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    remaining = tl.load(remaining_ptr + row)
    wanted = tl.maximum(remaining, 1)
    is_digit = (above < wanted) & (wanted <= above + counts)
    prefix = tl.load(prefix_ptr + row)
    digit = tl.sum(tl.where(is_digit, o_bin, 0), 0)
    tl.store(prefix_ptr + row, prefix * BINS + digit.to(prefix.dtype))
    tl.store(remaining_ptr + row, remaining - tl.sum(tl.where(is_digit, above, 0), 0))


@triton.jit(do_not_specialize=["n", "num_tiles", "tile_keys"], do_not_specialize_on_alignment=list(ROWS))
def _mask_kernel(
    keys_ptr,  # [num_rows, n] uint32 or uint64
    threshold_ptr,  # [num_rows] dtype of keys, sign bit flipped
    remaining_ptr,  # [num_rows] int64, how many keys equal to the threshold are taken
    histograms_ptr,  # [num_rows, num_tiles, BINS] int32, of the last digit
    mask_ptr,  # [num_rows, n] bool
    n,
    num_tiles,
    tile_keys,  # a multiple of BLOCK
    SIGN: tl.constexpr,
    BINS: tl.constexpr,
    MAX_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mark the keys of a tile above the threshold, and its share of the ties (earlier tiles have priority)."""
    tile = tl.program_id(0).to(tl.int64)
    row = tile // num_tiles
    begin = tile % num_tiles * tile_keys
    threshold = tl.load(threshold_ptr + row)
    o_tile = tl.arange(0, MAX_TILES)
    p_ties = histograms_ptr + (row * num_tiles + o_tile) * BINS + (threshold % BINS).to(tl.int32)
    # Ties of earlier tiles take their share first, so that the lower positions win, whatever order programs run in.
    ties_before = tl.load(p_ties, mask=o_tile < tile % num_tiles, other=0)
    missing = tl.load(remaining_ptr + row) - tl.sum(ties_before, 0)
    for start in range(begin, tl.minimum(begin + tile_keys, n), BLOCK):
        i_key = start + tl.arange(0, BLOCK)
        m_key = i_key < n
        bits = tl.load(keys_ptr + row * n + i_key, mask=m_key, other=0) ^ SIGN
        ties = (bits == threshold).to(tl.int32)  # padding may tie, but comes last
        taken = (bits > threshold) | ((ties > 0) & (tl.cumsum(ties, 0) <= missing))
        tl.store(mask_ptr + row * n + i_key, taken, mask=m_key)
        missing -= tl.sum(ties, 0)


def top_mask_triton(keys: Tensor, counts: int | Tensor) -> Tensor:
    """Device path of :func:`kvevict_kernels.radix_select.top_mask`: two launches per byte of a key, and one."""
    mask = torch.empty(keys.shape, dtype=torch.bool, device=keys.device)
    _select(keys, counts, mask)
    return mask


def kth_largest_triton(keys: Tensor, counts: int | Tensor) -> Tensor:
    """Device path of :func:`kvevict_kernels.radix_select.kth_largest`: two launches per byte of a key."""
    thresholds = _select(keys, counts, None)
    return thresholds ^ torch.iinfo(thresholds.dtype).min


def _select(keys: Tensor, counts: int | Tensor, mask: Tensor | None) -> Tensor:
    """Find the thresholds [num_rows], dtype of ``keys`` (int16: int32), sign bit flipped; fill a mask."""
    keys = keys.int() if keys.dtype == torch.int16 else keys  # what kernels read
    num_rows, n = keys.shape
    device = keys.device
    key_bits = torch.iinfo(keys.dtype).bits
    block = KEY_BLOCK
    tile_keys = block * triton.cdiv(n, block * MAX_TILES)
    num_tiles = triton.cdiv(n, tile_keys)
    rows_at_once = min(num_rows, max(1, HISTOGRAM_BYTES // (num_tiles * BINS * 4)))
    histograms = torch.empty(rows_at_once, num_tiles, BINS, dtype=torch.int32, device=device)
    thresholds = torch.zeros(num_rows, dtype=keys.dtype, device=device)
    # A copy: the kernels count it down.
    wanted = thresholds.new_full((num_rows,), counts, dtype=torch.int64) if isinstance(counts, int) else counts.clone()
    sizes = {"BINS": BINS, "num_warps": NUM_WARPS}
    tiling = {"SIGN": 1 << (key_bits - 1), "BLOCK": block, **sizes}
    for first in range(0, num_rows, rows_at_once):
        rows = slice(first, first + rows_at_once)
        row_keys, prefix = (x[rows].view(UNSIGNED[keys.dtype]) for x in (keys, thresholds))
        remaining = wanted[rows]
        grid = (remaining.numel() * num_tiles,)
        for shift in range(key_bits - 8, -1, -8):
            _histogram_kernel[grid](row_keys, prefix, histograms, n, num_tiles, tile_keys, shift, **tiling)
            _pick_kernel[remaining.shape](histograms, prefix, remaining, num_tiles, BLOCK=TILE_BLOCK, **sizes)
        if mask is not None:
            _mask_kernel[grid](
                row_keys,
                prefix,
                remaining,
                histograms,
                mask[rows],
                n,
                num_tiles,
                tile_keys,
                MAX_TILES=MAX_TILES,
                **tiling,
            )
    return thresholds
