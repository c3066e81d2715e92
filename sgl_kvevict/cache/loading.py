"""Loads prefixes from the store: which queued requests wait, and for how long."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from sgl_kvevict.cache.adoption import Adoption, Prompt
from sgl_kvevict.cache.core import Core
from sgl_kvevict.cache.host import HostMemory
from sgl_kvevict.cache.saving import StoreAccess
from sgl_kvevict.guard import Place
from sgl_kvevict.store.reader import Fetch, ReadAhead
from sgl_kvevict.store.segment_file import SegmentRecord

READ_AHEAD = 16
"""Requests at the head of the queue whose prefixes are fetched: a prefix loaded much too early would be evicted."""
MAX_LOOKED_AT = 256
"""Queued requests visited in each turn of the loop."""


@dataclass
class Waiting:
    """A queued request that may find more in the store than in the tree.

    Attributes:
        deadline: until when it waits for its turn, at the head of the queue; seconds of the clock of ``ReadAhead``.
        is_begun: it had its turn.
        fetch: the fetch that it waits for; None: it had no turn yet, or there is nothing to fetch.
    """

    prompt: Prompt
    deadline: float
    is_begun: bool = False
    fetch: Fetch | None = None


class Answer(IntEnum):
    """State of a request's prefix on one rank; the largest of all ranks counts."""

    HERE = 0
    """It was fetched."""
    COMING = 1
    """The request waits for it, or for its turn."""
    LATE = 2
    """The request has waited for too long, and goes on without it."""
    NOTHING = 3
    """There is nothing to fetch, or the store failed."""


class Loading:
    """Fetches prefixes for requests at the head of the queue, and puts them into the tree.

    Tensor-parallel ranks have the same queue and tree, and each reads its own part of a prefix. They agree on each
    prefix: all load it, or none. After an error the prefix is computed.
    """

    def __init__(
        self, core: Core, adoption: Adoption, access: StoreAccess, reader: ReadAhead, host: HostMemory
    ) -> None:
        self._tree, self._table, self._readers, self._guard = core.tree, core.table, core.readers, core.guard
        self._host, self._adoption, self._access, self._reader = host, adoption, access, reader
        self._waiting: dict[Any, Waiting] = {}

    def state(self) -> tuple[int, int]:
        """Fetches that were skipped, and requests that wait for their prefix, or for their turn to fetch it."""
        return self._reader.num_skipped, len(self._waiting)

    def clear(self) -> None:
        """Let waiting requests go on without the store."""
        for request in tuple(self._waiting):
            self._forget(request)

    def queued(self, request: Any, prompt: Prompt) -> None:
        """Register a queued request, if the store may have its prefix."""
        identity = self._access.segments.identity
        if self._access.is_on and prompt.num_tokens >= identity.min_prefix_tokens:
            self._waiting[request] = Waiting(prompt, self._reader.deadline())

    def settle(self, queue: Sequence[Any]) -> set[Any]:
        """Put fetched prefixes into the tree, and start fetches for requests at the head of the queue.

        Called between two steps, on all ranks, with the requests that wait for admission, in order; returns those that
        must not be admitted yet. A fetch whose request was aborted ends with the segment that it reads.
        """
        # The usual case, in every turn of the loop: no exchange between ranks.
        if not self._waiting:
            return set()
        # They were aborted: nobody waits for their fetches.
        for request in self._waiting.keys() - set(queue):
            self._forget(request)
        for request in queue[:READ_AHEAD]:
            waiting = self._waiting.get(request)
            if waiting is not None and not waiting.is_begun:
                self._begin(request, waiting)
        there = {request: self._waiting[request] for request in queue[:MAX_LOOKED_AT] if request in self._waiting}
        still = set()
        for (request, waiting), answer in zip(there.items(), self._agree(list(there.values())), strict=True):
            if answer is Answer.COMING:
                still.add(request)
            elif waiting.is_begun:
                del self._waiting[request]
                self._end(request, waiting, answer)
        return still

    def _forget(self, request: Any) -> None:
        fetch = self._waiting.pop(request).fetch
        if fetch is not None:
            fetch.is_abandoned = True

    def _begin(self, request: Any, waiting: Waiting) -> None:
        """Start a fetch if the store may have more of a prompt than the tree and the host."""
        waiting.is_begun = True
        prompt = waiting.prompt
        # The host first: it is nearer, and what it has need not be read from the store.
        self._host.load(request, prompt)
        with self._guard.at(Place.STORE):
            waiting.fetch = self._reader.start(self._adoption.lookup(prompt, self._access.segments.identity))

    def _agree(self, waiting: Sequence[Waiting]) -> list[Answer]:
        """Combine all ranks' answers, with the same result on each."""
        answers = [self._answer(each) for each in waiting]
        # Ranks may have read different segments, if another server has replaced one meanwhile.
        parts = [
            _signature(each) if answer is Answer.HERE else 0 for each, answer in zip(waiting, answers, strict=True)
        ]
        ranks = self._tree.gather([*answers, *parts]) if waiting else [[]]
        agreed = []
        for i in range(len(waiting)):
            worst = Answer(max(rank[i] for rank in ranks))
            differ = len({rank[len(waiting) + i] for rank in ranks}) > 1
            # All ranks go by the slowest one: a prefix that one of them lacks is computed by all.
            agreed.append(Answer.NOTHING if worst is Answer.HERE and differ else worst)
        return agreed

    def _answer(self, waiting: Waiting) -> Answer:
        if not waiting.is_begun:
            return Answer.LATE if self._reader.has_passed(waiting.deadline) else Answer.COMING
        if waiting.fetch is None:
            return Answer.NOTHING
        if waiting.fetch.is_done:
            return Answer.HERE
        return Answer.LATE if self._reader.is_late(waiting.fetch) else Answer.COMING

    def _end(self, request: Any, waiting: Waiting, answer: Answer) -> None:
        """Place what was fetched for a request that waits no longer, or report why there is nothing."""
        # No fetch was begun, so there is nothing to count and nothing to abandon.
        if waiting.fetch is None:
            return
        if answer is Answer.LATE:
            self._table.totals.late_loads += 1
        self._table.totals.failed_loads += len(waiting.fetch.errors)
        if answer is Answer.HERE:
            # One rank may lack the memory, and the others would then exchange numbers that it does not.
            with self._guard.at(Place.HOST):
                self._place(request, waiting.fetch.records, waiting.prompt)
        else:
            waiting.fetch.is_abandoned = True

    def _place(self, request: Any, records: Sequence[SegmentRecord], prompt: Prompt) -> None:
        reads = self._readers[request]
        for record in records:
            num_tokens = self._adoption.adopt(record, prompt.namespace, prompt.tokens[record.end :])
            if num_tokens == 0:
                self._table.totals.not_placed += 1
                # Maybe the tree has got this one meanwhile, and the next continues it.
                continue
            if reads.store_start is None:
                reads.store_start = record.end - num_tokens
            self._table.totals.loaded_segments += 1
            self._table.totals.loaded_tokens += num_tokens


def _signature(waiting: Waiting) -> int:
    """Checksum that is equal on ranks that fetched their parts of the same prefix."""
    assert waiting.fetch is not None
    parts = [
        (
            *(record.start, record.end, record.splittable),
            *(list(record.tensors), record.kept.rows.bits),
            None if record.evicted is None else record.evicted.bits,
            zlib.crc32(record.tokens.numpy().tobytes()),  # paths of the same length may differ
        )
        for record in waiting.fetch.records
    ]
    return zlib.crc32(repr(parts).encode())
