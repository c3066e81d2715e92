"""Which queued requests wait for what the store has of their prompts, and what comes of it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from weakref import WeakKeyDictionary

from torch import Tensor

from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.lifecycle.listener import LOAD_ERROR, LOAD_LATE, LOAD_NO_PLACE, CacheListener
from sgl_kvevict.lifecycle.nodes import Reader, length_of
from sgl_kvevict.lifecycle.ports import TreePort
from sgl_kvevict.lifecycle.spans import SpanTable
from sgl_kvevict.lifecycle.stored import Adoption
from sgl_kvevict.store import Fetch, ReadAhead, SegmentRecord, StoreIdentity, Wanted

READ_AHEAD = 16
"""For so many requests at the head of the queue prefixes are fetched: what came much too early would be pushed out."""
MAX_LOOKED_AT = 256
"""So many requests of the queue are looked at in each turn of the loop, however long it is."""


@dataclass(frozen=True)
class Prompt:
    """What a request may find in a cache.

    Attributes:
        tokens: of the prompt, and maybe more.
        num_tokens: how many of them may be found.
        extra_key: namespace.
        cache_salt: likewise.
    """

    tokens: Sequence[int]
    num_tokens: int
    extra_key: str | None
    cache_salt: str | None


@dataclass
class Waiting:
    """A queued request that may find more in the store than in the tree.

    Attributes:
        prompt: its prompt.
        deadline: how long it waits for its turn to have its prefix fetched.
        is_begun: it was its turn.
        fetch: what it waits for; None: not begun, or nothing was to be hoped for.
    """

    prompt: Prompt
    deadline: float
    is_begun: bool = False
    fetch: Fetch | None = None


class Answer(IntEnum):
    """What a rank knows of a request's prefix; of all ranks' answers the largest counts."""

    HERE = 0
    COMING = 1
    LATE = 2
    NOTHING = 3
    """There was nothing to fetch, or the store is in trouble."""


class Loading:
    """Fetches prefixes of queued requests, the first of the queue first, and puts them into the tree.

    Tensor-parallel ranks have the same queue and the same tree, and each reads its own part of a prefix. Whether it is
    loaded they agree on: all load it, or none does.

    Args:
        tree: whose nodes.
        spans: what they hold.
        adoption: puts into the tree what was read.
        identity: of this server.
        reader: fetches.
        guard: holds errors; the prefix is then computed.

    Attributes:
        listener: told of what was loaded.
    """

    def __init__(
        self,
        tree: TreePort,
        spans: SpanTable,
        adoption: Adoption,
        identity: StoreIdentity,
        reader: ReadAhead,
        guard: Guard,
    ) -> None:
        self.listener = CacheListener()
        self._tree = tree
        self._spans = spans
        self._adoption = adoption
        self._identity = identity
        self._reader = reader
        self._guard = guard
        self._waiting: WeakKeyDictionary[Reader, Waiting] = WeakKeyDictionary()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their prefix, or for their turn to."""
        return len(self._waiting)

    @property
    def num_skipped(self) -> int:
        """Prompts that were not looked for, because the store was in trouble or too many waited."""
        return self._reader.num_skipped

    def clear(self) -> None:
        """Nothing is loaded for who waits now."""
        for waiting in tuple(self._waiting.values()):
            if waiting.fetch is not None:
                self._reader.abandon(waiting.fetch)
        self._waiting.clear()

    def queued(self, reader: Reader, prompt: Prompt) -> None:
        """A request was queued."""
        if prompt.num_tokens >= self._identity.min_prefix_tokens:
            self._waiting[reader] = Waiting(prompt, self._reader.deadline())

    def settle(self, queue: Sequence[Reader]) -> set[Reader]:
        """Put what has come into the tree, and begin to fetch for who has come to the head of the queue.

        Between two steps only, on all ranks.

        Args:
            queue: requests that wait to be admitted, in their order.

        Returns:
            Those that are not to be admitted yet.
        """
        if not self._waiting:
            return set()
        for reader in queue[:READ_AHEAD]:
            waiting = self._waiting.get(reader)
            if waiting is not None and not waiting.is_begun:
                self._begin(waiting)
        there = {reader: self._waiting[reader] for reader in queue[:MAX_LOOKED_AT] if reader in self._waiting}
        still = set()
        for (reader, waiting), answer in zip(there.items(), self._agree(list(there.values())), strict=True):
            if answer is Answer.COMING:
                still.add(reader)
            elif waiting.is_begun:
                del self._waiting[reader]
                self._end(waiting, answer)
        return still

    def _begin(self, waiting: Waiting) -> None:
        """See whether a prompt goes on beyond what the tree has, and begin to fetch."""
        waiting.is_begun = True
        prompt = waiting.prompt
        with self._guard.at(Place.STORE):
            tokens = list(prompt.tokens[: prompt.num_tokens])
            path = self._tree.find(tokens, prompt.extra_key, prompt.cache_salt)
            namespace = self._identity.namespace(prompt.extra_key, prompt.cache_salt)
            waiting.fetch = self._reader.start(Wanted(tokens, namespace, self._spans.waterline(path), length_of(path)))

    def _agree(self, waiting: Sequence[Waiting]) -> list[Answer]:
        """What all ranks together know of requests, the same on all of them."""
        answers = [self._answer(each) for each in waiting]
        parts = [
            _signature(each) if answer is Answer.HERE else 0 for each, answer in zip(waiting, answers, strict=True)
        ]
        ranks = self._tree.gather([*answers, *parts]) if waiting else [[]]
        agreed = []
        for i in range(len(waiting)):
            worst = Answer(max(rank[i] for rank in ranks))
            differ = len({rank[len(waiting) + i] for rank in ranks}) > 1
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

    def _end(self, waiting: Waiting, answer: Answer) -> None:
        """A request waits no longer."""
        if waiting.fetch is None:
            return
        if answer is Answer.LATE:
            self.listener.load_failed(LOAD_LATE)
        for error in tuple(waiting.fetch.errors):
            self.listener.load_failed(LOAD_ERROR, error)
        if answer is Answer.HERE:
            with self._guard.at(Place.STORE):
                self._place(waiting.fetch.records, waiting.prompt)
        else:
            self._reader.abandon(waiting.fetch)

    def _place(self, records: Sequence[SegmentRecord], prompt: Prompt) -> None:
        for record in records:
            num_tokens = self._adoption.adopt(record, prompt.extra_key, prompt.cache_salt)
            if num_tokens == 0:
                self.listener.load_failed(LOAD_NO_PLACE)
                continue
            if record.tail_tokens is not None and _goes_on(prompt, record):
                self._adoption.adopt_tail(record, prompt.extra_key, prompt.cache_salt)
            self.listener.loaded(record.key, record.end - num_tokens, record.end)


def _goes_on(prompt: Prompt, record: SegmentRecord) -> bool:
    """Whether a prompt begins with all tokens of a segment's path and the first one of its tail."""
    assert record.tail_tokens is not None
    if prompt.num_tokens <= record.end:
        return False
    return list(prompt.tokens[: record.end + 1]) == [*record.tokens.tolist(), int(record.tail_tokens[0])]


def _signature(waiting: Waiting) -> int:
    """A number that is the same on ranks that fetched their parts of the same prefix."""
    assert waiting.fetch is not None
    parts = [
        (
            *(record.start, record.end, record.splittable, record.is_read),
            *(each is None for each in (record.worth, record.biases, record.policy_state)),
            *(_sum_of(record.tokens), _sum_of(record.tail_tokens)),
        )
        for record in waiting.fetch.records
    ]
    return zlib.crc32(repr(parts).encode())


def _sum_of(tokens: Tensor | None) -> int:
    """Checksum of tokens; of the same length is not the same text."""
    return 0 if tokens is None else zlib.crc32(tokens.numpy().tobytes())
