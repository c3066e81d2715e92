"""Segments in the host's memory: one arena of fixed blocks, from which those that save least go first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor

from sgl_kvevict.store.identity import CHAIN_TOKENS, Namespace, StoreIdentity
from sgl_kvevict.store.reader import common_length
from sgl_kvevict.store.segment_file import TENSORS, SegmentRecord

MAX_NEAR = 64
"""Segments looked at that leave a prompt after the same block; the newest are."""


@dataclass(eq=False)
class HostSegment:
    """A segment in blocks of the arena.

    Attributes:
        record: its tensors have no contents, but shapes and dtypes, except ``tokens``, by which it is found.
        names: hashes of the blocks of its path, by which it is found.
        blocks: numbers of the arena's blocks that hold it.
        credit: tokens that it saves per block, above the level at its last use; the smallest goes first.
        in_pool: it was loaded, and the pool did not drop it since.
    """

    record: SegmentRecord
    names: list[str]
    blocks: list[int]
    credit: float = 0.0
    in_pool: bool = False


class HostSegments:
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
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.identity = identity
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
        self._through: dict[str, dict[str, HostSegment]] = {}  # by the hash of each block of their paths
        self._ending: dict[str, dict[str, HostSegment]] = {}  # by that of the last one
        self._free = list(range(self.num_blocks))
        self._num_spare = 0  # blocks of segments that are in the pool, too
        self._level = 0.0

    def has_room(self, num_bytes: int) -> bool:
        """Whether a segment of so many bytes fits without losing one that is not in the pool."""
        return self._blocks_for(num_bytes) <= len(self._free) + self._num_spare

    # ---- as a store -------------------------------------------------------------------------------------------

    def put(self, record: SegmentRecord, namespace: Namespace) -> int:
        """Copy a segment, whose tensors but ``tokens`` lie on the pool's device; return the bytes of its blocks.

        0: it does not fit. A segment of the same key is replaced.
        """
        parts = sorted(_parts(record), key=lambda part: -part[1].element_size())  # so each is aligned
        num_blocks = self._largest(self._blocks_for(sum(part.nbytes for _, part in parts)))
        self.delete(record.key)
        if num_blocks > self.num_blocks:
            return 0
        while len(self._free) < num_blocks:
            self._evict()
        blocks, self._free = self._free[:num_blocks], self._free[num_blocks:]
        self._write(blocks, [part for _, part in parts])
        shapes: dict[str, Any] = {name: part.to("meta") for name, part in parts}
        names = namespace.blocks(record.tokens.tolist(), self._step)
        segment = HostSegment(replace(record, **shapes), names, blocks)
        self._segments[record.key] = segment
        for index, name in self._places(segment):
            index.setdefault(name, {})[record.key] = segment
        self.use(record.key)
        return num_blocks * self.block_bytes

    def find(self, tokens: Sequence[int], namespace: Namespace) -> list[tuple[int, SegmentRecord]]:
        """Records of segments whose paths begin like a prompt, each with the number of tokens that it shares."""
        found: dict[str, tuple[int, SegmentRecord]] = {}
        names = namespace.blocks(tokens, self._step)
        for depth in range(len(names), 0, -1):
            near = self._ending.get(names[depth - 1], {})
            if not found:  # paths that leave the prompt before others do are found only if they end there
                through = self._through.get(names[depth - 1], {})
                near = near | dict(islice(reversed(through.items()), MAX_NEAR))
            begin, end = depth * self._step, (depth + 1) * self._step
            for key, segment in near.items():
                same = begin + common_length(tokens[begin:end], segment.record.tokens[begin:end].tolist())
                found.setdefault(key, (same, segment.record))
        return list(found.values())

    def get(self, key: str) -> SegmentRecord | None:
        """Copy a segment to the pool's device; None: there is none."""
        segment = self._segments.get(key)
        if segment is None:
            return None
        data = self._read(segment.blocks)
        parts: dict[str, Any] = {}
        offset = 0
        for name, part in sorted(_parts(segment.record), key=lambda part: -part[1].element_size()):
            num_bytes = prod(part.shape) * part.element_size()
            parts[name] = data[offset : offset + num_bytes].view(part.dtype).view(part.shape)
            offset += num_bytes
        return replace(segment.record, **parts)

    def delete(self, key: str) -> bool:
        """Remove a segment; False: there was none."""
        segment = self._segments.pop(key, None)
        if segment is None:
            return False
        for index, name in self._places(segment):
            del index[name][key]
            if not index[name]:
                del index[name]
        self._free += segment.blocks
        self._num_spare -= len(segment.blocks) * segment.in_pool
        return True

    def _places(self, segment: HostSegment) -> list[tuple[dict[str, dict[str, HostSegment]], str]]:
        """Where a segment is found: indexes, and its keys in them."""
        return [(self._ending, segment.names[-1]), *((self._through, name) for name in segment.names)]

    # ---- what goes first --------------------------------------------------------------------------------------

    def covering(self, tokens: Sequence[int], start: int, namespace: Namespace) -> SegmentRecord | None:
        """The segment that stands for the tokens from ``start`` on of a path, or for more; None: there is none."""
        for same, record in self.find(tokens, namespace):
            reaches = same == len(tokens) and record.start <= start
            if reaches and (record.end == same or record.splittable):
                return record
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

    @property
    def _step(self) -> int:
        """Tokens of a block of a path."""
        return min(CHAIN_TOKENS, self.identity.min_prefix_tokens)

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


def _parts(record: SegmentRecord) -> list[tuple[str, Tensor]]:
    """Tensors of a record that lie in blocks, by name: all but the tokens, which are needed to find it."""
    parts = [(name, getattr(record, name)) for name in TENSORS if name != "tokens"]
    return [(name, part) for name, part in parts if part is not None]
