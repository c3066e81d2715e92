"""A tier: a place outside the pool where segments lie, and how a prompt finds those of its path there.

There is one index. A segment is listed under the names of a few block-aligned prefixes of its path, from the half of
the segment on to its last whole block (:func:`listed_blocks`). A prompt computes the names of all its own block-aligned
prefixes, one hash chain, and asks for them at once. A name only says where to look: what is found is compared with the
prompt token by token before an entry of it is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import eq
from typing import TYPE_CHECKING

import msgspec

from sgl_kvevict.store.identity import KEY, Namespace, StoreIdentity, key_bounds

if TYPE_CHECKING:  # torch is imported where tensors are made: `sgl-kvevict store ls` starts without it
    from torch import Tensor

    from sgl_kvevict.store.segment_file import SegmentRecord

MIN_USED = 0.5
"""Share of a segment's tokens that a prompt must share, so that moving all of it pays."""
MAX_LISTED = 8
"""Steps between the first and the last prefix under which a segment is listed: a prompt that leaves it in the middle
finds it within 1/16 of its length."""
MAX_TRIES = 8
"""Segments read to find the longest match: names do not cover the last tokens."""


class IndexEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the index says of a segment.

    Attributes:
        key: its name, see :meth:`Namespace.segment`.
        splittable: a prompt that diverges inside it can use its beginning.
        is_complete: it has every entry of its tokens.
    """

    key: KEY
    splittable: bool
    is_complete: bool = False

    @property
    def start(self) -> int:
        """Logical position of its first token."""
        return key_bounds(self.key)[0]

    @property
    def end(self) -> int:
        """Logical position after its last token."""
        return key_bounds(self.key)[1]

    @staticmethod
    def of(record: SegmentRecord) -> IndexEntry:
        """The entry of a segment."""
        return IndexEntry(record.key, record.splittable, record.is_complete)


@dataclass(frozen=True)
class Lookup:
    """A prompt to look up; the tree has its first ``cached`` tokens, ``compressed`` of them in packed segments."""

    tokens: Sequence[int]
    namespace: Namespace
    compressed: int
    cached: int


Match = tuple[int, IndexEntry]
"""A segment and the number of tokens that its path is known to share with a prompt."""


class Tier(ABC):
    """Segments of one identity, outside the pool."""

    def __init__(self, identity: StoreIdentity) -> None:
        self.identity = identity

    @abstractmethod
    def _listed(self, names: Sequence[str]) -> Mapping[str, Iterable[IndexEntry]]:
        """What is listed under names of prefixes, the newest first; names without entries may be missing."""

    def find(self, tokens: Sequence[int], namespace: Namespace) -> list[Match]:
        """Return segments whose paths begin like a prompt, those that are listed deepest on its path first."""
        block_tokens = self.identity.block_tokens
        names = namespace.chain(tokens, block_tokens)
        listed = self._listed(names)
        found: dict[str, Match] = {}
        # Deepest first: a segment is listed at several depths, and its first hit here is its longest match.
        for number in range(len(names), 0, -1):
            for entry in listed.get(names[number - 1], ()):
                if entry.key not in found:
                    found[entry.key] = self._num_shared(entry, tokens, number * block_tokens), entry
        return list(found.values())

    def continuing(
        self, lookup: Lookup, found: Sequence[Match], get: Callable[[str], SegmentRecord | None]
    ) -> Iterator[SegmentRecord]:
        """Yield the segments that continue what the tree has of a prompt, in the order of its path.

        Each one, of those ``found``, reaches farthest of those that begin where the last one ended, and at least
        ``min_prefix_tokens`` beyond it. ``get`` reads one; None: it is gone.
        """
        # A segment may replace uncompressed tokens of the tree, so it has to begin where compressed ones end, and to
        # reach beyond all that the tree has.
        compressed, cached = lookup.compressed, lookup.cached
        while True:
            best, longest = None, cached + self.identity.min_prefix_tokens - 1
            # Of equal matches the one that begins latest: the fewest of its entries are cut off again.
            by_length = sorted(found, key=lambda each: (-each[0], -each[1].start))
            worth = (match for match in by_length if pays(match[1], match[0], compressed))
            for overlap, entry in islice(worth, MAX_TRIES):
                # A read is expensive; one that cannot reach farther is not made.
                record = get(entry.key) if overlap > longest else None
                if record is not None:
                    # The name covers whole blocks only, and a forged index could list anything: tokens decide.
                    same = num_shared(lookup.tokens, record.tokens)
                    if same > longest and pays(IndexEntry.of(record), same, compressed):
                        best, longest = record, same
            if best is None:
                return
            yield best
            compressed = cached = longest  # also if the prompt diverges inside this one: others may begin there

    def _names(self, record: SegmentRecord, namespace: Namespace) -> list[str]:
        """Names of the prefixes under which a segment is listed, ascending by length."""
        block_tokens = self.identity.block_tokens
        chain = namespace.chain(array("q", record.tokens.numpy().tobytes()), block_tokens)
        return [chain[number - 1] for number in listed_blocks(IndexEntry.of(record), block_tokens)]

    def _num_shared(self, entry: IndexEntry, tokens: Sequence[int], num_known: int) -> int:
        """Tokens that a segment's path shares with a prompt; a hash says so of ``num_known``.

        Where the path is not at hand: if all whole blocks agree, so may the rest. (The same prompt, asked again, lacks
        its last token here.)
        """
        is_last = num_known > entry.end - self.identity.block_tokens
        return min(entry.end, len(tokens)) if is_last else num_known


def listed_blocks(entry: IndexEntry, block_tokens: int) -> list[int]:
    """Numbers of whole blocks of a segment's path under whose names it is listed, ascending.

    A prompt that shares fewer tokens does not use it (:data:`MIN_USED`). One that cannot be split is listed under its
    last block alone.
    """
    last = entry.end // block_tokens
    # One that cannot be split is used whole or not at all, so no shorter prompt has to find it.
    if not entry.splittable or not last:
        return [last] if last else []
    half = entry.start + int(MIN_USED * (entry.end - entry.start))
    first = min(max(-(-half // block_tokens), 1), last)
    step = max(-(-(last - first) // MAX_LISTED), 1)
    # Steps are counted from the end, because the last block is asked for most: by the same prompt, or a longer one. A
    # caller relies on the order.
    return sorted({first, *range(last, first, -step)})


def num_shared(tokens: Sequence[int], path: Tensor) -> int:
    """Number of equal tokens at the beginning of a prompt and a path, [num_tokens], int64, on the CPU."""
    return sum(takewhile(bool, map(eq, tokens, path.tolist())))


def pays(entry: IndexEntry, same: int, start: int) -> bool:
    """Whether a segment is worth reading for a prompt that it continues at ``start``, and matches up to ``same``.

    A splittable segment may begin earlier: its entries before ``start`` are cut off.
    """
    if not entry.splittable:
        return entry.start == start and entry.end == same
    num_used = same - start
    return entry.start <= start and (same == entry.end or num_used >= MIN_USED * (entry.end - entry.start))
