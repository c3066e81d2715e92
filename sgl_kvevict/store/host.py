"""The tier of the host's memory: one arena of fixed blocks, from which what saves least goes first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod

import torch
from torch import Tensor

from sgl_kvevict.store.identity import Namespace, StoreIdentity
from sgl_kvevict.store.segment_file import SegmentRecord
from sgl_kvevict.store.tier import IndexEntry, Tier, listed_blocks, num_shared

MAX_NEAR = 64
"""Segments looked at that are listed under one name; the newest are."""


@dataclass(eq=False)
class HostSegment:
    """A segment in blocks of the arena.

    Attributes:
        record: its tensors have no contents, but shapes and dtypes, except ``tokens``, which are compared.
        names: prefixes of its path under which it is listed.
        blocks: numbers of the arena's blocks that hold it.
        credit: tokens that it saves per block, above the level at its last use; the smallest goes first.
        in_pool: it was loaded, and the pool did not drop it since.
    """

    record: SegmentRecord
    names: list[str]
    blocks: list[int]
    credit: float = 0.0
    in_pool: bool = False


class HostSegments(Tier):
    """Segments of one pool in ``num_blocks`` blocks of ``block_bytes`` bytes, which are allocated once.

    As in the pool (``cache/recency.py``), what saves the fewest tokens of prefill per byte, and was not used for
    long, goes first (GreedyDual-Size). A segment that was loaded goes before all others, until the pool drops it.

    On a GPU the arena is pinned, and copies run on a stream of their own.

    Args:
        device: of the pool.
        identity: of this server's pool; segments of others never get here.
        largest: of all tensor-parallel ranks; the same segments then lie on each.

    Attributes:
        num_evicted: segments that went because others needed room.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        device: torch.device,
        identity: StoreIdentity,
        largest: Callable[[int], int] = int,
    ) -> None:
        super().__init__(identity)
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._device = device
        self._largest = largest
        self._arena = torch.empty(num_blocks, block_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.clear()

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that hold segments."""
        return (self.num_blocks - len(self._free)) * self.block_bytes

    def clear(self) -> None:
        """Forget all segments."""
        self._segments: dict[str, HostSegment] = {}
        self._index: dict[str, dict[str, IndexEntry]] = {}  # by name of a prefix, then by key
        self._free = list(range(self.num_blocks))
        self._num_spare = 0  # blocks of segments that are in the pool, too
        self._level = 0.0

    def has_room(self, num_bytes: int) -> bool:
        """Whether a segment of so many bytes fits without losing one that is not in the pool."""
        return self._blocks_for(num_bytes) <= len(self._free) + self._num_spare

    # ---- as a tier --------------------------------------------------------------------------------------------

    def put(self, record: SegmentRecord, namespace: Namespace) -> int:
        """Copy a segment, whose tensors but ``tokens`` lie on the pool's device; return the bytes of its blocks.

        0: it does not fit. A segment of the same key is replaced.
        """
        parts = _parts(record)
        num_blocks = self._largest(self._blocks_for(sum(part.nbytes for part in parts.values())))
        self.delete(record.key)
        if num_blocks > self.num_blocks:
            return 0
        while len(self._free) < num_blocks:
            self._evict()
        blocks, self._free = self._free[:num_blocks], self._free[num_blocks:]
        self._write(blocks, list(parts.values()))
        shapes = {name: part.to("meta") for name, part in parts.items()}
        entry, block_tokens = IndexEntry.of(record), self.identity.block_tokens
        chain = namespace.chain(record.tokens.tolist(), block_tokens)
        names = [chain[number - 1] for number in listed_blocks(entry, block_tokens)]
        without_contents = record.with_tensors({"tokens": record.tokens, **shapes})
        self._segments[record.key] = HostSegment(without_contents, names, blocks)
        for name in names:
            self._index.setdefault(name, {})[record.key] = entry
        self.use(record.key)
        return num_blocks * self.block_bytes

    def get(self, key: str) -> SegmentRecord | None:
        """Copy a segment to the pool's device; None: there is none."""
        segment = self._segments.get(key)
        if segment is None:
            return None
        data, offset = self._read(segment.blocks), 0
        tensors = {"tokens": segment.record.tokens}
        for name, part in _parts(segment.record).items():
            num_bytes = prod(part.shape) * part.element_size()
            tensors[name] = data[offset : offset + num_bytes].view(part.dtype).view(part.shape)
            offset += num_bytes
        return segment.record.with_tensors(tensors)

    def delete(self, key: str) -> bool:
        """Remove a segment; False: there was none."""
        segment = self._segments.pop(key, None)
        if segment is None:
            return False
        for name in segment.names:
            del self._index[name][key]
            if not self._index[name]:
                del self._index[name]
        self._free += segment.blocks
        self._num_spare -= len(segment.blocks) * segment.in_pool
        return True

    def _listed(self, names: Sequence[str]) -> Mapping[str, list[IndexEntry]]:
        there = {name: self._index[name] for name in names if name in self._index}
        return {name: list(islice(reversed(entries.values()), MAX_NEAR)) for name, entries in there.items()}

    def _num_shared(self, entry: IndexEntry, tokens: Sequence[int], num_known: int) -> int:
        """See :class:`Tier`; exactly, because the path is at hand."""
        path = self._segments[entry.key].record.tokens
        return num_known + num_shared(tokens[num_known : entry.end], path[num_known:])

    # ---- what goes first --------------------------------------------------------------------------------------

    def covering(self, tokens: Sequence[int], start: int, namespace: Namespace) -> IndexEntry | None:
        """The segment that has the tokens from ``start`` on of a path, or more; None: there is none."""
        for same, entry in self.find(tokens, namespace):
            has_all = same == len(tokens) and entry.start <= start
            if has_all and (entry.end == same or entry.splittable):
                return entry
        return None

    def use(self, key: str, *, in_pool: bool = False) -> None:
        """Note that the pool loaded a segment (``in_pool``), or dropped it, just now; it may be gone."""
        segment = self._segments.get(key)
        if segment is None:
            return
        self._num_spare += len(segment.blocks) * (in_pool - segment.in_pool)
        segment.in_pool = in_pool
        saved = (segment.record.end - segment.record.start) / len(segment.blocks)
        segment.credit = self._level + saved

    def _evict(self) -> None:
        """Remove the segment of least credit, one that is in the pool before all others."""
        segment = min(self._segments.values(), key=lambda each: (not each.in_pool, each.credit))
        if not segment.in_pool:
            self._level = max(self._level, segment.credit)
            self.num_evicted += 1
        self.delete(segment.record.key)

    # ---- the arena --------------------------------------------------------------------------------------------

    def _blocks_for(self, num_bytes: int) -> int:
        return -(-num_bytes // self.block_bytes)

    def _write(self, blocks: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Copy tensors, one after the other, into blocks; on a GPU behind what is launched, without waiting."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            data = torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])
            for block, begin in zip(blocks, range(0, data.numel(), self.block_bytes), strict=False):
                piece = data[begin : begin + self.block_bytes]  # fewer than blocks if another rank needs more
                self._arena[block, : piece.numel()].copy_(piece, non_blocking=True)
        if self._stream is not None:
            for part in parts:
                part.record_stream(self._stream)

    def _read(self, blocks: Sequence[int]) -> Tensor:
        """Copy blocks to the pool's device, beside the forward in flight; what is launched next waits for them."""
        with torch.cuda.stream(self._stream):
            data = torch.empty(len(blocks), self.block_bytes, dtype=torch.uint8, device=self._device)
            for row, block in zip(data, blocks, strict=True):
                row.copy_(self._arena[block], non_blocking=True)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            data.record_stream(current)
        return data.flatten()


def _parts(record: SegmentRecord) -> dict[str, Tensor]:
    """Tensors of a record that lie in blocks: all but those that stay to compare; large numbers first, so aligned."""
    parts = {name: part for name, part in record.tensors.items() if name != "tokens"}
    return dict(sorted(parts.items(), key=lambda each: -each[1].element_size()))
