"""The tier of the host's memory: one arena of fixed blocks, from which what saves least goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count, groupby, islice
from math import prod

import torch
from torch import Tensor

from sgl_kvevict.copies import CopiedRows, Copy, EvictedPart
from sgl_kvevict.store.identity import Namespace, StoreIdentity
from sgl_kvevict.store.segment_file import SegmentRecord
from sgl_kvevict.store.tier import IndexEntry, Tier, num_shared, pays

MAX_NEAR = 64
"""Segments looked at that are listed under one name; the newest are."""
SPARE_ENTRIES = 64
"""The heap of segments is rebuilt if it has more than two entries for each, and these beside."""
ALIGNMENT = 16
"""Bytes: tensors begin at multiples of it, in blocks one after the other, as kernels that read rows require."""


@dataclass(eq=False)
class HostSegment:
    """A segment in blocks of the arena.

    Attributes:
        record: its tensors have no contents, but shapes and dtypes, except ``tokens``, which are compared.
        names: prefixes of its path under which it is listed.
        copy: what the pool had of it.
        credit: tokens that it saves per block, above the level at its last use; the smallest goes first.
        in_pool: it was loaded, and the pool did not drop it since.
        loose: blocks that it gives up in all steps but the last, in which it loses most.
    """

    record: SegmentRecord
    names: list[str]
    copy: Copy
    credit: float = 0.0
    in_pool: bool = False
    loose: int = 0

    @property
    def place(self) -> tuple[bool, bool, float]:
        """Among all: the smallest goes, or shrinks, first."""
        return not self.in_pool, not self.loose, self.credit


class HostSegments(Tier):
    """Segments of one pool in an arena of ``num_blocks`` blocks of ``block_bytes`` bytes.

    As in the pool (``cache/recency.py``), what saves the fewest tokens of prefill per byte, and was not used for long,
    goes first (GreedyDual-Size). Segments that were loaded go before all others, until the pool drops them. Evicted
    entries go next, the oldest first, whether a segment still has them or not. So they never push out a segment that
    the pool does not have. As in the pool, a segment shrinks in steps before it goes.

    The tokens of paths, which look-ups compare, lie beside the blocks and count as if they lay in them: many short
    segments may end long paths.

    On a GPU copies run on a stream of their own.

    Args:
        arena: [num_blocks, block_bytes], uint8, on the CPU; on a GPU locked into RAM.
        identity: of this server's pool; segments of others never get here.
        largest: of all tensor-parallel ranks; the same segments then lie on each.

    Attributes:
        sizes: numbers of entries, beside those of sinks, to which a segment may shrink, descending.
        num_evicted: segments that went because others needed room.
        evicted: entries that were evicted from segments; first what was written first.
    """

    def __init__(
        self, arena: Tensor, device: torch.device, identity: StoreIdentity, largest: Callable[[int], int] = int
    ) -> None:
        super().__init__(identity)
        self.num_blocks, self.block_bytes = arena.shape
        self.sizes: Callable[[SegmentRecord], Sequence[int]] = lambda record: ()
        self.num_evicted = 0
        self.evicted: dict[EvictedPart, None] = {}
        self._device = device
        self.largest = largest
        self._arena = arena
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.clear()

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks in use."""
        return (self.num_blocks - len(self._free)) * self.block_bytes

    def clear(self) -> None:
        """Forget all segments."""
        self._segments: dict[str, HostSegment] = {}
        self._index: dict[str, dict[str, IndexEntry]] = {}  # by name of a prefix, then by key
        self._free = list(range(self.num_blocks))
        for part in self.evicted:
            part.blocks.clear()
        self.evicted.clear()
        self._num_spare = 0  # blocks of evicted entries, and of segments that are in the pool, too
        self._num_loose = 0  # what all other segments give up in their first steps
        self._level = 0.0
        # A heap of keys; those of former places are skipped.
        self._order: list[tuple[tuple[bool, bool, float], int, str]] = []
        self._numbers = count()

    def has_room(self, num_bytes: int) -> bool:
        """Whether a segment of so many bytes fits before one that is not in the pool takes its last step, or goes."""
        # Without what they give up before, the pool would go to its least share while copies stay at the budget.
        return -(-num_bytes // self.block_bytes) <= len(self._free) + self._num_spare + self._num_loose

    # ---- as a tier --------------------------------------------------------------------------------------------

    def put(self, record: SegmentRecord, namespace: Namespace) -> int:
        """Copy a segment, whose tensors but ``tokens`` lie on the pool's device; return the bytes of its blocks.

        0: it does not fit. A segment of the same key is replaced.
        """
        parts = _parts(record)
        # Ranks keep different numbers of entries for the same tokens. They take equally many blocks, so that they have
        # equally many free ones and evict the same.
        num_blocks = self.largest(self._blocks_for(record.tensors))
        data = self._gathered(parts)
        self.delete(record.key)
        if num_blocks > self.num_blocks:
            return 0
        while len(self._free) < num_blocks:
            self._evict()
        copy = Copy(_shapes(parts), self._write(data, num_blocks))
        names = self._names(record, namespace)
        # Look-ups compare tokens and read shapes; the rows themselves lie in the blocks alone.
        without_contents = record.with_tensors({"tokens": record.tokens, **copy.shapes})
        segment = self._segments[record.key] = HostSegment(without_contents, names, copy)
        for name in names:
            self._index.setdefault(name, {})[record.key] = IndexEntry.of(record)
        self._add(segment)
        self.use(record.key)
        return num_blocks * self.block_bytes

    def get(self, key: str) -> SegmentRecord | None:
        """Copy a segment to the pool's device; None: there is none."""
        segment = self._segments.get(key)
        if segment is None:
            return None
        return segment.record.with_tensors({"tokens": segment.record.tokens, **self._read(segment.copy)})

    def delete(self, key: str) -> bool:
        """Remove a segment; False: there was none."""
        segment = self._segments.pop(key, None)
        if segment is None:
            return False
        for name in segment.names:
            del self._index[name][key]
            # Names are hashes of prompts: empty ones would pile up for as long as the server runs.
            if not self._index[name]:
                del self._index[name]
        self._free += segment.copy.blocks
        self._count(segment, -1)
        return True

    def _listed(self, names: Sequence[str]) -> Mapping[str, list[IndexEntry]]:
        there = {name: self._index[name] for name in names if name in self._index}
        # Newest first, and no more: thousands of prompts may share one system prompt, and each look-up would walk all
        # of them.
        return {name: list(islice(reversed(entries.values()), MAX_NEAR)) for name, entries in there.items()}

    def _num_shared(self, entry: IndexEntry, tokens: Sequence[int], num_known: int) -> int:
        """Tokens that a segment's path shares with a prompt: exactly, because the path is at hand."""
        path = self._segments[entry.key].record.tokens
        return num_known + num_shared(tokens[num_known : entry.end], path[num_known:])

    # ---- what was evicted from segments -----------------------------------------------------------------------

    def put_evicted(self, copied: CopiedRows, start: int, end: int) -> list[EvictedPart]:
        """Move evicted entries of the tokens ``[start, end)``, logical positions, into blocks; return the part.

        []: there is no room beside segments that the pool does not have. Entries from a file are on the CPU. They, too,
        go by way of the pool's device, whose stream lets them wait for copies under way that still read the blocks.
        """
        tensors = {name: each.to(self._device) for name, each in vars(copied).items()}
        num_blocks = self.largest(self._blocks_for(tensors))
        # Evicted entries are a convenience. A prefix that only the host has would cost its whole prefill.
        if num_blocks > len(self._free) + self._num_spare:
            return []
        data = self._gathered(tensors)
        while len(self._free) < num_blocks:
            self._evict()
        part = EvictedPart(_shapes(tensors), self._write(data, num_blocks), start, end)
        self.evicted[part] = None
        self._num_spare += num_blocks
        return [part]

    def get_evicted(self, part: EvictedPart) -> CopiedRows:
        """Copy a part that is not lost to the pool's device. One of which tokens were cut off needs a host sync."""
        rows = CopiedRows(**self._read(part))
        return rows.within(part.start, part.end) if part.is_cut else rows

    # ---- what goes first --------------------------------------------------------------------------------------

    def covering(self, tokens: Sequence[int], start: int, namespace: Namespace) -> SegmentRecord | None:
        """The segment, without contents, that has the tokens from ``start`` on of a path, or more; None: none has.

        Only one that would be loaded for them: of a much longer one too little is used.
        """
        for same, entry in self.find(tokens, namespace):
            if same == len(tokens) and pays(entry, same, start):
                return self._segments[entry.key].record
        return None

    def use(self, key: str, *, in_pool: bool = False) -> None:
        """Note that the pool loaded a segment (``in_pool``), or dropped it, just now; it may be gone."""
        segment = self._segments.get(key)
        if segment is None:
            return
        self._count(segment, -1)
        segment.in_pool = in_pool
        saved = (segment.record.end - segment.record.start) / len(segment.copy.blocks)
        # GreedyDual-Size: the level rises with what goes, so that an old segment of high value goes, too, in the end.
        segment.credit = self._level + saved
        self._count(segment, 1)

    def _evict(self) -> None:
        """Remove a copy of what the pool has, else evicted entries; else one shrinks, its last step last, or goes."""
        segment = self._first()
        if segment is None or (not segment.in_pool and self.evicted):
            part = next(iter(self.evicted))
            del self.evicted[part]
            self._num_spare -= len(part.blocks)
            self._free += part.blocks
            part.blocks.clear()  # so it is lost for all segments that have it
        elif not segment.in_pool and (step := next(self._steps(segment), None)) is not None:
            self._keep_best(segment, *step)
        else:
            if not segment.in_pool:  # a copy of what the pool has was worth nothing, and raises no level
                self._level = max(self._level, segment.credit)
                self.num_evicted += 1
            self.delete(segment.record.key)

    def _first(self) -> HostSegment | None:
        """The segment that goes, or shrinks, first; None: there is none."""
        while self._order:
            place, _, key = self._order[0]
            if (segment := self._segments.get(key)) is not None and segment.place == place:
                return segment
            heappop(self._order)
        return None

    def _count(self, segment: HostSegment, sign: int) -> None:
        """Add (``sign`` 1) or take back (-1) the blocks that a segment leaves to others; 1 also gives it its place."""
        if segment.in_pool:
            self._num_spare += sign * len(segment.copy.blocks)
        else:
            self._num_loose += sign * segment.loose
        if sign > 0:
            if len(self._order) > 2 * len(self._segments) + SPARE_ENTRIES:  # most are of former places
                self._order = [(each.place, next(self._numbers), key) for key, each in self._segments.items()]
                heapify(self._order)
            heappush(self._order, (segment.place, next(self._numbers), segment.record.key))

    def _steps(self, segment: HostSegment) -> Iterator[tuple[int, int]]:
        """Numbers of entries to which a segment may shrink, descending, each with the blocks that they take."""
        rows = segment.record.kept.rows
        for size in self.sizes(segment.record):
            number = min(size, rows.num_entries)
            fewer = {f"rows.{name}": part[:number] for name, part in vars(rows).items() if name != "keep_lens"}
            # Ranks keep different numbers of entries, and take equally many blocks.
            num_blocks = self.largest(self._blocks_for(segment.record.tensors | fewer))
            if num_blocks < len(segment.copy.blocks):
                yield number, num_blocks

    def _add(self, segment: HostSegment) -> None:
        """Count a segment of which the blocks were just written."""
        left = [len(segment.copy.blocks), *(num_blocks for _, num_blocks in self._steps(segment))]
        segment.loose = left[0] - left[-2] if len(left) > 1 else 0
        self._count(segment, 1)

    def _keep_best(self, segment: HostSegment, number: int, num_blocks: int) -> None:
        """Write a segment's best entries into so many of its blocks; all others are lost."""
        record, blocks, whole = segment.record, segment.copy.blocks, self.get(segment.record.key)
        assert whole is not None
        parts = _parts(replace(whole, kept=replace(whole.kept, rows=whole.kept.rows.best(number))))
        data = self._gathered(parts)
        self._count(segment, -1)
        self._free += blocks
        segment.copy = Copy(_shapes(parts), self._write(data, num_blocks))
        lost = EvictedPart({}, [], record.start, record.end)
        left = record.with_tensors({"tokens": record.tokens, **segment.copy.shapes})
        segment.record = replace(left, parts=[*record.parts, lost])
        num_tokens = record.end - record.start
        # As for one that goes: what is used from now on is worth more.
        self._level = max(self._level, segment.credit)
        segment.credit += num_tokens / num_blocks - num_tokens / len(blocks)
        self._add(segment)

    # ---- the arena --------------------------------------------------------------------------------------------

    def _blocks_for(self, parts: Mapping[str, Tensor]) -> int:
        """Blocks that tensors take."""
        return -(-sum(_padded(part.nbytes) for part in parts.values()) // self.block_bytes)

    def _gathered(self, parts: Mapping[str, Tensor]) -> Tensor:
        """[num_bytes], uint8: tensors one after the other, on the pool's device; on a GPU behind what is launched.

        This allocates, so it comes before anything changes: without the memory everything stays as it is.
        """
        if self._stream is not None:
            # The parts were written on the scheduler's stream a moment ago.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            padded: list[Tensor] = []
            for part in parts.values():
                own = part.contiguous().flatten().view(torch.uint8)
                padded += [own, own.new_empty(_padded(own.numel()) - own.numel())]
            data = torch.cat(padded) if padded else torch.empty(0, dtype=torch.uint8)
        if self._stream is not None:
            for part in parts.values():
                # Their memory belongs to the scheduler's stream: without this the allocator may hand it out before it
                # has been read here.
                part.record_stream(self._stream)
        return data

    def _write(self, data: Tensor, num_blocks: int) -> list[int]:
        """Copy gathered tensors into free blocks, on a GPU without waiting; return these.

        They are more than the tensors need if another rank needs more.
        """
        # Sorted, because neighbouring blocks are one copy, and one launch.
        first = len(self._free) - num_blocks
        blocks = sorted(self._free[first:])
        del self._free[first:]  # from the end: a pool of many layers has a million of them
        with torch.cuda.stream(self._stream):
            # `data` was allocated on this stream, so its memory is not used again before these copies have read it.
            for there, here in self._ranges(blocks, data):
                there.copy_(here, non_blocking=True)
        return blocks

    def _read(self, copy: Copy) -> dict[str, Tensor]:
        """Copy blocks to the pool's device, beside the forward in flight; what is launched next waits for them."""
        with torch.cuda.stream(self._stream):
            num_bytes = sum(_padded(part.nbytes) for part in copy.shapes.values())
            # Nothing to wait for: the memory is fresh, and the blocks were written on this stream, too.
            data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            for there, here in self._ranges(copy.blocks, data):
                here.copy_(there, non_blocking=True)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            data.record_stream(current)
        offset, tensors = 0, {}
        for name, part in copy.shapes.items():
            num_bytes = prod(part.shape) * part.element_size()
            tensors[name] = data[offset : offset + num_bytes].view(part.dtype).view(part.shape)
            offset += _padded(num_bytes)
        return tensors

    def _ranges(self, blocks: Sequence[int], data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of the arena, and those of ``data`` ([num_bytes], uint8) that lie there; neighbouring blocks together.

        Each range is one copy.
        """
        arena, begin = self._arena.view(-1), 0
        for _, group in groupby(enumerate(blocks), lambda at: at[1] - at[0]):
            numbers = [block for _, block in group]
            here = data[begin : begin + len(numbers) * self.block_bytes]
            if not here.numel():
                break  # another rank needs the rest
            start = numbers[0] * self.block_bytes
            yield arena[start : start + here.numel()], here
            begin += here.numel()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _parts(record: SegmentRecord) -> dict[str, Tensor]:
    """Tensors of a record that lie in blocks: all but those that stay to compare."""
    return {name: part for name, part in record.tensors.items() if name != "tokens"}


def _shapes(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same shapes and dtypes without contents."""
    return {name: part.to("meta") for name, part in parts.items()}
