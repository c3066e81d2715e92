"""Tile sizes by architecture, head_dim and q rows: what compiles without spills and keeps copies in flight.

Chosen by compilation alone (docs/results/gpu/compiled.md); never timed on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvevict_kernels.device_limits import DeviceLimits


@dataclass(frozen=True)
class Tile:
    """How a kernel is compiled.

    Attributes:
        rows: q rows.
        keys: K and V rows per step of the loop.
        stages: of software pipelining. Index, then K and V, then products: below 5 no copy runs beside the products.
        warps: per program.
    """

    rows: int
    keys: int
    stages: int
    warps: int


DECODE_ROWS = (16, 64)
"""Q rows per tile of the split kernel, by class: decode rows that read alone; many sharers, or several new tokens."""
EXTEND = 2
"""Place of ``ragged_extend``'s tile, behind the classes of the split kernel."""
HEAD_DIMS = (64, 128, 256)
"""Widths of the table; a smaller head_dim takes the next one."""
FAMILIES = (80, 89, 90, 100)
SMALL_SHARED = 102400
"""Bytes of a multiprocessor with little shared memory (sm_86, sm_89, sm_120): these take the tiles of sm_89."""

TILES: dict[tuple[int, int], tuple[Tile, Tile, Tile]] = {
    # (family, head_dim): split kernel with 16 rows, with 64 rows, ragged_extend
    (80, 64): (Tile(16, 64, 5, 4), Tile(64, 64, 5, 4), Tile(128, 64, 5, 8)),
    (80, 128): (Tile(16, 64, 5, 4), Tile(64, 32, 5, 4), Tile(128, 32, 5, 8)),
    (80, 256): (Tile(16, 32, 5, 4), Tile(64, 32, 5, 8), Tile(64, 16, 5, 8)),
    (89, 64): (Tile(16, 64, 5, 4), Tile(64, 64, 5, 4), Tile(128, 64, 5, 8)),
    (89, 128): (Tile(16, 32, 5, 4), Tile(64, 32, 5, 4), Tile(128, 32, 5, 8)),
    (89, 256): (Tile(16, 32, 5, 4), Tile(64, 16, 5, 8), Tile(64, 16, 5, 8)),
    (90, 64): (Tile(16, 64, 7, 4), Tile(64, 64, 5, 4), Tile(128, 64, 5, 8)),
    (90, 128): (Tile(16, 32, 7, 4), Tile(64, 64, 5, 4), Tile(128, 64, 7, 8)),
    (90, 256): (Tile(16, 32, 5, 4), Tile(64, 32, 5, 8), Tile(64, 32, 5, 8)),
    (100, 64): (Tile(16, 64, 7, 4), Tile(64, 64, 5, 4), Tile(128, 64, 5, 8)),
    (100, 128): (Tile(16, 64, 5, 4), Tile(64, 32, 5, 4), Tile(128, 32, 7, 8)),
    (100, 256): (Tile(16, 32, 5, 4), Tile(64, 16, 5, 8), Tile(64, 16, 5, 8)),
}

BIASED: dict[tuple[int, int, int], Tile] = {
    # (family, head_dim, place in the row above)
    (89, 256, 0): Tile(16, 16, 5, 4),
    (100, 64, 1): Tile(64, 32, 5, 4),
    (100, 128, 1): Tile(64, 32, 5, 8),
}
"""Tiles of kernels that add biases, where those above would keep something on the stack; their rows are the same."""


WINDOWED: dict[tuple[int, int, int], Tile] = {
    (80, 128, 0): Tile(16, 32, 5, 4),
    (80, 128, 1): Tile(64, 16, 5, 4),
    (80, 256, 1): Tile(64, 16, 5, 8),
    (89, 128, 0): Tile(16, 16, 5, 4),
    (89, 128, 1): Tile(64, 16, 5, 4),
    (89, 128, 2): Tile(128, 16, 5, 8),
    (90, 256, 1): Tile(64, 16, 5, 8),
    (100, 64, 1): Tile(64, 32, 5, 4),
    (100, 64, 2): Tile(128, 32, 5, 8),
    (100, 128, 0): Tile(16, 32, 5, 4),
}
"""The same of kernels of layers with a window."""


def family_of(limits: DeviceLimits) -> int:
    """Row of the table for a device: the newest family that is not newer, among those with its shared memory."""
    if limits.shared_per_sm <= SMALL_SHARED:
        return 89
    return max((family for family in FAMILIES if family != 89 and family <= limits.arch), default=80)


def tiles_for(
    limits: DeviceLimits, head_dim: int, *, has_biases: bool = False, has_window: bool = False
) -> tuple[Tile, ...]:
    """Tiles of a device: split kernel with 16 rows, with 64 rows, ``ragged_extend``.

    Args:
        limits: of the device.
        head_dim: width of a K row.
        has_biases: whether the kernels add a bias per entry. Neither this nor a window changes a tile's rows.
        has_window: whether they hide what is before a window.

    Raises:
        ValueError: head_dim beyond the table.
    """
    width = next((width for width in HEAD_DIMS if head_dim <= width), None)
    if width is None:
        raise ValueError(f"head_dim: expected at most {HEAD_DIMS[-1]}, got {head_dim}")
    family = family_of(limits)
    tiles = TILES[family, width]
    special = BIASED if has_biases else WINDOWED if has_window else None
    return tiles if special is None else tuple(special.get((family, width, i), tile) for i, tile in enumerate(tiles))
