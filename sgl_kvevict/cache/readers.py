"""Readers: requests that attend to a prefix, with one record each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from sgl_kvevict.cache.nodes import Node, Reader, path_to
from sgl_kvevict.cache.ports import TreePort
from sgl_kvevict.cache_report import CacheReport, CompressedRead
from sgl_kvevict.segments.prompt_observation import PromptObservation


@dataclass(eq=False)
class ReaderRecord:
    """State of one reader.

    Attributes:
        is_live: it has matched its prompt and was not released.
        is_exact: it must read no compressed entry (``exact``).
        least_share: share of the entries of compressed prefixes that it wants to read (``share``, ``complete``).
        chunk_share: its prompt is longer than the pool: share of their bytes that its chunks get as soon as they are
            computed; None: it is not.
        room: token slots that were available when its prompt was last looked up in the host's memory; -1: not since it
            was released last. For a request that waits for its admission this is tried again when there are more.
        num_left: :attr:`HostMemory.num_left` then: its prompt may be among what has left the pool since.
        host_start: logical position from which on its prompt was loaded from the host's memory; None: it was not.
        store_start: the same of the store, which has what neither pool nor host had.
        observation: of its prefill; None before, after :meth:`Prefills.complete`, and if nothing of it will be cached.
        computed_again: of an exact reader: prompt tokens that it computes although the tree has them.
        report: what its client is told, beside how many tokens came from pool, host and store. What it reads of its
            prompt is noted several times, of which the one that has lost most counts. None: not noted yet.
        is_counted: its prompt is complete, and in the totals, or in them with the request before its samples.
    """

    is_live: bool = False
    is_exact: bool = False
    least_share: float = 0.0
    chunk_share: float | None = None
    room: int = -1
    num_left: int = 0
    host_start: int | None = None
    store_start: int | None = None
    observation: PromptObservation | None = None
    computed_again: int = 0
    report: CacheReport | None = None
    is_counted: bool = False

    def has_read(self, read: CompressedRead) -> None:
        """Note what it reads of its prompt now."""
        told = self.report
        if told is None or read.lost_bits >= told.compressed.lost_bits:
            again, early = self.computed_again, told.prefilled_compressed if told else 0
            self.report = CacheReport(compressed=read, computed_again=again, prefilled_compressed=early)

    def has_compressed(self, num_tokens: int) -> None:
        """Note how many tokens that it computed were compressed before its prefill was complete."""
        self.report = replace(self.report or CacheReport(), prefilled_compressed=num_tokens)

    def sources(self, num_tokens: int) -> tuple[int, int, int]:
        """How many of the first ``num_tokens`` tokens, which it has found, came from pool, host and store."""
        store_start = num_tokens if self.store_start is None else min(self.store_start, num_tokens)
        host_start = store_start if self.host_start is None else min(self.host_start, store_start)
        return host_start, store_start - host_start, num_tokens - store_start


class ReaderTable:
    """Records of readers, which end with their request objects, and the nodes that readers lock.

    A reader is *movable* if its slots may be replaced between two of its steps: its next forward plans from the tree.
    A request with ``exact`` is not, nor is a lock whose reader is unknown.
    """

    def __init__(self, tree: TreePort) -> None:
        self._tree = tree
        # Weak: SGLang tells of a release, but a request that is refused early just disappears.
        self._records: WeakKeyDictionary[Reader, ReaderRecord] = WeakKeyDictionary()

    def __iter__(self) -> Iterator[Reader]:
        """Live readers."""
        # A copy, because a request object may be collected while this is walked.
        return iter([reader for reader, record in self._records.items() if record.is_live])

    def __getitem__(self, reader: Reader) -> ReaderRecord:
        """The record of a reader, created if missing."""
        # No `setdefault`: it would make a record for each look-up, several times a step.
        if (record := self._records.get(reader)) is None:
            record = self._records[reader] = ReaderRecord()
        return record

    def is_exact(self, reader: Reader) -> bool:
        """Whether a reader must read no compressed entry; makes no record, of which each waiting request had one."""
        record = self._records.get(reader)
        return record is not None and record.is_exact

    def has_exact(self, path: Sequence[Node]) -> bool:
        """Whether an exact request reads a part of a path."""
        lasts = (self._tree.locked_by(reader) for reader in self if self[reader].is_exact)
        return any(node in path_to(last) for last in lasts if last is not None for node in path[:1])

    def movable(self, node: Node) -> list[Reader] | None:
        """Return the readers of a node; None if one of them is not movable."""
        readers, num_fixed = [], 0
        for reader in self:
            if (last := self._tree.locked_by(reader)) and node in path_to(last):
                readers.append(reader)
                num_fixed += self[reader].is_exact
        # A lock that no known request explains could be anything of SGLang's; its slots must not move.
        return None if num_fixed or len(readers) != self._tree.num_locks(node) else readers

    def movable_nodes(self) -> list[Node]:
        """Locked nodes whose readers, and those of all nodes above, are movable; root side first.

        The path of :meth:`TreePort.holding` counts as locked by a movable reader.
        """
        paths = [(reader, path_to(last)) for reader in self if (last := self._tree.locked_by(reader)) is not None]
        counts = Counter(node for _, path in paths for node in path)
        fixed = {node for reader, path in paths if self[reader].is_exact for node in path}
        held = self._tree.held
        movable: dict[Node, None] = {}
        for path in [*(path for _, path in paths), [] if held is None else path_to(held)]:
            for node in path:
                if node in movable:
                    continue
                if node in fixed or counts[node] != self._tree.num_locks(node):
                    # Below a node that must not move none may: a path's compressed tokens come first.
                    break
                movable[node] = None
        return list(movable)
