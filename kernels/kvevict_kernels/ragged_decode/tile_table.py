"""Tile sizes by architecture and head_dim that compile without spills and keep copies in flight.

Chosen by compilation (docs/results/gpu/compiled.md), on the safe side; right and timed on an H200 only.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvevict_kernels.device_limits import DeviceLimits

FEW_ROWS = 16
"""Q rows per tile of the split kernel's first class: unshared decode rows."""
MANY_ROWS = {80: (64, 64, 64), 89: (64, 128, 64), 90: (128, 128, 64), 100: (64, 64, 64)}
"""By family, for each width of ``HEAD_DIMS``: q rows of the second class (many sharers, or several new tokens).

A tile of 128 rows reads K and V half as often as two of 64, and a warp issues a third fewer instructions per row
(compiled). A tile that is at most half full wastes the other half of its products. On sm_90, and on sm_89 at width 128,
it still takes less time than its keys take from memory; on sm_80 and sm_100 it would take 1.3 to 1.5 times as long
(estimate). At width 64 a tile of 128 rows gains nothing on sm_89: with a window 63 % of the peak, not 70."""
FP8_ROWS = 64
"""The same on sm_89 at width 128 where the arena holds float8. Every warp converts all numbers of K and V, so a tile of
128 rows takes as long as two of 64 (compiled), which is longer than half the bytes take from memory (estimate)."""
EXTEND = 2
"""Index of ``ragged_extend``'s tile, after the classes of the split kernel."""
STAGES = 5
"""Of software pipelining: index, then K and V, then products. Below 5 no copy overlaps with the products."""
HEAD_DIMS = (64, 128, 256)
"""Widths of the table; a smaller head_dim uses the next larger one."""
FAMILIES = (80, 89, 90, 100)
SMALL_SHARED = 102400
"""Bytes of shared memory of a multiprocessor: up to this (sm_86, sm_89, sm_120) the tiles of sm_89 are used."""
WIDE_FEW_BITS_ROWS = 32
"""Q rows of the split kernel's larger tile where head_dim is above 128 and rows may have 4 bits: the numbers of 64 do
not fit the registers, whatever the keys and warps."""
KEYS = {
    **{(80, 64): (64, 64, 64), (80, 128): (32, 32, 32), (80, 256): (32, 32, 16)},
    **{(89, 64): (64, 64, 64), (89, 128): (32, 32, 32), (89, 256): (16, 16, 16)},
    **{(90, 64): (64, 64, 64), (90, 128): (32, 64, 128), (90, 256): (32, 32, 32)},
    **{(100, 64): (32, 32, 64), (100, 128): (32, 32, 32), (100, 256): (16, 16, 16)},
}
"""By (family, head_dim): K and V rows per step of the loop, of each kernel's tile in the order of ``tiles_for``.
With 128 a warp of ``ragged_extend`` issues 300 instructions per 64 keys on sm_90, with 64 it issues 417 (compiled). The
split kernel's larger tile cannot have 128 there: with rows of few bits, and with trees over float8, up to 144 bytes of
a thread are on the stack."""
MIN_KEYS = 16
LATENT_DIM = 576
"""Width of a wider head_dim: a latent of 512 numbers, which are also the value, and 64 of a rotated key."""
LATENTS = {
    80: ((16, 32), (64, 16), (64, 16)),
    89: ((16, 32), (32, 16), (32, 16)),
    90: ((16, 32), (64, 32), (64, 32)),
    100: ((16, 32), (32, 32), (32, 32)),
}
"""By family: q rows, and keys per step, of each kernel's tile for latents. Results are 512 wide, in float32."""


@dataclass(frozen=True)
class Tile:
    """Compilation options of a kernel."""

    rows: int  # q rows
    keys: int  # K and V rows per step of the loop
    warps: int  # per program
    stages: int = STAGES  # of software pipelining


def family_of(limits: DeviceLimits) -> int:
    """Row of the table for a device: the newest family that is not newer, among those with its shared memory."""
    if limits.shared_per_sm <= SMALL_SHARED:
        return 89
    return max((family for family in FAMILIES if family != 89 and family <= limits.arch), default=80)


def tiles_for(
    limits: DeviceLimits,
    head_dim: int,
    *,
    has_window: bool = False,
    has_few_bits: bool = False,
    is_fp8: bool = False,
) -> tuple[Tile, Tile, Tile]:
    """Tiles of a device: split kernel with 16 rows, with 64 or 128 rows (or 32), ``ragged_extend``.

    With ``has_window`` the kernel also reads positions, and has registers for half the keys; rows stay the same. With
    ``has_few_bits`` it also reads rows of 4 bits, which takes more warps at width 128. ``is_fp8``: the arena holds
    float8. ValueError: head_dim beyond the table.
    """
    width = next((width for width in HEAD_DIMS if head_dim <= width), None)
    if width is None:
        return _latent_tiles(limits, head_dim)
    family = family_of(limits)
    keys: tuple[int, ...] = KEYS[family, width]
    if has_window:
        keys = tuple(max(one // 2, MIN_KEYS) for one in keys)
    is_wide = width == HEAD_DIMS[-1]
    many_rows = MANY_ROWS[family][HEAD_DIMS.index(width)]
    if is_wide and has_few_bits:
        many_rows = WIDE_FEW_BITS_ROWS
    elif is_fp8 and family == 89:
        many_rows = FP8_ROWS
    many_warps = 8 if is_wide or many_rows == 128 or (has_few_bits and width == 128) else 4
    many = Tile(many_rows, keys[1], warps=many_warps)
    extend = Tile(64 if is_wide else 128, keys[EXTEND], warps=8)
    if is_wide and has_few_bits and family == 80:
        # With 64 rows, rows of 4 bits take 1.7 KB of a thread's stack and 2.8 times the instructions (compiled). On
        # sm_89, too, but there half the tile would take 1.7 times the instructions for rows of 16 bits.
        extend = many
    return Tile(FEW_ROWS, keys[0], warps=4), many, extend


def narrow_keys(tile: Tile) -> int:
    """K and V rows of 4 bits per step of the loop: with more than 64, a thread's numbers do not fit its registers."""
    return min(tile.keys * 2 if tile.rows == FEW_ROWS else tile.keys, 64)


def _latent_tiles(limits: DeviceLimits, head_dim: int) -> tuple[Tile, Tile, Tile]:
    """Layers that read latents have no windows."""
    if head_dim > LATENT_DIM:
        raise ValueError(f"head_dim: expected at most {LATENT_DIM}, got {head_dim}")
    few, many, extend = (Tile(rows, keys, warps=8) for rows, keys in LATENTS[family_of(limits)])
    return few, many, extend


def block_widths(head_dim: int, v_head_dim: int) -> dict[str, int]:
    """Constants of the kernels: columns of keys and values, and the blocks that hold them.

    Values narrower than keys are the first columns of these (latents); a block of its own holds the rest.
    """
    rest = head_dim - v_head_dim
    return {
        "D": head_dim,
        "DV": v_head_dim,
        "BLOCK_D": _power_of_two(v_head_dim),
        "BLOCK_ROT": _power_of_two(rest) if rest else 0,
    }


def _power_of_two(width: int) -> int:
    """The next one, at least 16, as products need it."""
    return max(16, 1 << (width - 1).bit_length())
