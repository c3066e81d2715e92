"""Cuts ragged work units into equal blocks, so that one batched call does many units at once.

A *unit* is a set of q rows that all attend to one run of KV rows. Its run is cut into blocks of ``block`` rows;
the last one is filled up with copies of a row of the same run, which the mask hides. ``lanes`` blocks form a
*tile*. Every block gives one *partial* result for each of its q rows; :func:`merge_table` says which partials
belong to which q row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024)
BLOCK_OVERHEAD = 30
"""What a block costs beside its rows, in KV rows (measured: 1 us beside 30 to 40 ns a row, at 3 to 4 q rows)."""
MERGE_OVERHEAD = 500
"""What a merge costs where none would be needed, in KV rows of one thread (measured: 20 us)."""


@dataclass(frozen=True)
class Tiles:
    """Equal blocks of work. Partial ``i`` is element ``i`` of ``owners`` flattened.

    Attributes:
        q_rows: [num_tiles, rows, lanes], int32, q row of each partial; fillers repeat a row of their unit.
        owners: [num_tiles, rows, lanes], int32, the same with -1 for partials that nobody wants.
        kv_rows: [num_tiles, block, lanes], int32, KV row of each entry; fillers repeat a row of their run.
        mask: [num_tiles, lanes, 1, block], float32, 0, or what is given, for entries and -inf for fillers.
    """

    q_rows: Tensor
    owners: Tensor
    kv_rows: Tensor
    mask: Tensor

    def __getitem__(self, tiles: slice) -> Tiles:
        """A range of the tiles (views)."""
        return Tiles(self.q_rows[tiles], self.owners[tiles], self.kv_rows[tiles], self.mask[tiles])

    @property
    def num_tiles(self) -> int:
        """Number of tiles; may be 0."""
        return self.q_rows.shape[0]


def choose_block(kv_lens: Tensor, *, is_merged_anyway: bool = True) -> int:
    """Pick the block size that keeps all threads busy and little of the work filler.

    Args:
        kv_lens: [num_calls, num_units], int, KV rows per unit of each call (layer) that will use the size.
        is_merged_anyway: q rows have other units too; if not, one block per unit saves the merge.

    Returns:
        One of ``BLOCK_SIZES`` (KV rows).
    """
    num_threads = torch.get_num_threads()
    sizes = torch.tensor(BLOCK_SIZES)
    num_blocks = (kv_lens[..., None] + sizes - 1) // sizes
    rounds = (num_blocks.sum(1) + num_threads - 1) // num_threads
    costs = rounds * (sizes + BLOCK_OVERHEAD)
    if not is_merged_anyway:
        costs = costs + MERGE_OVERHEAD * (num_blocks > 1).any(1)
    return int(sizes[costs.sum(0).argmin()])


def build_tiles(
    q_table: Tensor,
    kv_starts: Tensor,
    kv_lens: Tensor,
    kv_indices: Tensor,
    *,
    block: int,
    lanes: int = 1,
    num_groups: int = 1,
    biases: Tensor | None = None,
) -> tuple[Tiles, list[int]]:
    """Cut units into blocks and lay the blocks out in tiles.

    Units come in groups (the layers of a model) of equal size; tiles do not mix groups, so that a group's tiles
    are one slice.

    Args:
        q_table: [num_units, rows], int64, q rows of each unit, filled up with -1 at the end.
        kv_starts: [num_units], int64, where each unit's run starts in ``kv_indices``.
        kv_lens: [num_units], int64, KV rows of each unit; units of length 0 make no block.
        kv_indices: [num_entries], int32 or int64, KV rows; fewer than 2**31.
        block: KV rows per block.
        lanes: blocks per tile.
        num_groups: groups of units.
        biases: [num_entries], float32, added to the scores of each entry; None: nothing is.

    Returns:
        tiles, and the number of tiles per group (host).
    """
    num_blocks = (kv_lens + block - 1) // block
    group_blocks = num_blocks.view(num_groups, -1).sum(1)
    group_tiles = (group_blocks + lanes - 1) // lanes
    # Places of blocks, lanes * tiles in each group; the last block of a group is repeated in the places left over.
    place_group = torch.arange(num_groups).repeat_interleave(group_tiles * lanes)
    rank = torch.arange(place_group.numel()) - _exclusive_sum(group_tiles * lanes)[place_group]
    is_filler = rank >= group_blocks[place_group]
    rank = torch.minimum(rank, group_blocks[place_group] - 1)
    block_index = _exclusive_sum(group_blocks)[place_group] + rank
    unit = torch.arange(kv_lens.numel()).repeat_interleave(num_blocks)[block_index]
    start = (block_index - _exclusive_sum(num_blocks)[unit]) * block
    length = torch.clamp(kv_lens[unit] - start, max=block)

    offset = torch.arange(block, dtype=torch.int32)
    length = length.int()
    entry = torch.minimum(offset, length[:, None] - 1) + (kv_starts[unit] + start).int()[:, None]
    kv_rows = kv_indices.index_select(0, entry.view(-1)).view(-1, lanes, block).transpose(1, 2)
    added = 0.0 if biases is None else biases.index_select(0, entry.view(-1)).view(entry.shape)
    mask = torch.where(offset < length[:, None], added, float("-inf"))  # float32 suits every dtype of q
    owners = q_table[unit]
    q_rows = torch.where(owners < 0, owners[:, :1], owners)
    owners = owners.masked_fill(is_filler[:, None], -1)
    tiles = Tiles(
        q_rows=_lanes_last(q_rows, lanes).int(),
        owners=_lanes_last(owners, lanes).int(),
        kv_rows=kv_rows.contiguous(),
        mask=mask.view(-1, lanes, 1, block),
    )
    return tiles, group_tiles.tolist()


def merge_table(owners: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """List for each q row the partials that belong to it.

    Args:
        owners: [num_partials], int, q row of each partial; -1 belongs to nobody.
        num_rows: q rows.

    Returns:
        table [num_rows, width], int64, partial indices in ascending order; a row with fewer partials repeats
        its first one (rows without any: 0).
        counts [num_rows], int64, partials per row.
    """
    order = torch.argsort(owners, stable=True)
    counts = torch.bincount(owners[owners >= 0], minlength=num_rows)
    order = order[owners.numel() - int(counts.sum()) :]
    width = int(counts.max()) if num_rows else 0
    column = torch.arange(width)
    column = torch.where(column < counts[:, None], column, 0)
    entry = _exclusive_sum(counts)[:, None] + column
    if order.numel() == 0:
        return torch.zeros(num_rows, width, dtype=torch.int64), counts
    table = order[torch.clamp(entry, max=order.numel() - 1)]
    return torch.where(counts[:, None] > 0, table, 0), counts


def _exclusive_sum(x: Tensor) -> Tensor:
    return torch.cumsum(x, 0) - x


def _lanes_last(x: Tensor, lanes: int) -> Tensor:
    return x.view(-1, lanes, x.shape[1]).transpose(1, 2).contiguous()
