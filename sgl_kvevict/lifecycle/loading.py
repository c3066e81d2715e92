"""Loads prefixes from the store: which queued requests wait, and how stored segments get into the tree."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from sgl_kvevict.errors import StoreError
from sgl_kvevict.guard import Place, accounting
from sgl_kvevict.lifecycle.listener import LOAD_ERROR, LOAD_LATE, LOAD_NO_PLACE
from sgl_kvevict.lifecycle.nodes import Node, length_of, path_to
from sgl_kvevict.lifecycle.part import Part, Shared
from sgl_kvevict.lifecycle.ranges import Ranges
from sgl_kvevict.lifecycle.saving import StoreAccess
from sgl_kvevict.policies.parts import PolicyState
from sgl_kvevict.prefix import Segment
from sgl_kvevict.store import Fetch, ReadAhead, SegmentRecord, Wanted

READ_AHEAD = 16
"""Requests at the head of the queue whose prefixes are fetched: a prefix loaded much too early would be evicted."""
MAX_LOOKED_AT = 256
"""Queued requests visited in each turn of the loop."""


@dataclass(frozen=True)
class Prompt:
    """A prompt to look up in a cache: only the first ``num_tokens`` of ``tokens`` may be found."""

    tokens: Sequence[int]
    num_tokens: int
    extra_key: str | None
    cache_salt: str | None


@dataclass
class Waiting:
    """A queued request that may find more in the store than in the tree.

    Attributes:
        deadline: how long it waits for its turn to have its prefix fetched.
        is_begun: it had its turn.
        fetch: the fetch it waits for; None: not begun, or nothing to fetch.
    """

    prompt: Prompt
    deadline: float
    is_begun: bool = False
    fetch: Fetch | None = None


class Answer(IntEnum):
    """State of a request's prefix on one rank; the largest of all ranks counts."""

    HERE = 0
    COMING = 1
    LATE = 2
    NOTHING = 3
    """There is nothing to fetch, or the store failed."""


class Adoption(Part):
    """Puts stored segments into the tree, as if they had been compressed here."""

    def __init__(self, shared: Shared, ranges: Ranges) -> None:
        super().__init__(shared)
        self._ranges = ranges

    def adopt(self, record: SegmentRecord, extra_key: str | None, cache_salt: str | None) -> int:
        """Give a stored segment of this server's identity slots and nodes, in the namespace in which it was found.

        Returns how many of its last tokens were added; its beginning may be compressed in the tree already. 0: nothing
        was added, though other prefixes may have shrunk for it: there were no slots, the tree has all of it, the tokens
        before it are not compressed, or a reader of the tokens that it would replace is not movable.

        Raises:
            StoreError: the record's entries do not fit this server's pool.
        """
        geometry = self._packer.geometry
        if tuple(record.keep_lens.shape) != (geometry.num_layers, geometry.num_kv_heads):
            raise StoreError(f"a segment of {tuple(record.keep_lens.shape)} runs")
        if record.biases is not None and not self._packer.has_biases:
            raise StoreError("a fitted segment, and nothing is fitted here")
        if geometry.slots_for(record.num_entries) > record.end - record.start:
            raise StoreError(f"a segment of {record.num_entries} entries for {record.end - record.start} tokens")
        tokens: list[int] = record.tokens.tolist()
        there = self._tree.find(tokens, extra_key, cache_salt)
        waterline = self._spans.waterline(there)
        if record.splittable and record.start < waterline < record.end:
            record = record.after(waterline)
        fewest = -self._tree.largest(-record.num_entries)  # among all ranks
        if fewest == 0 or not self._fits(record, there):
            return 0  # before other prefixes shrink for it
        slots = self._tree.alloc(self._tree.largest(geometry.slots_for(record.num_entries), record.start, record.end))
        if slots is None:
            return 0
        if self._install(record, tokens, slots, extra_key, cache_salt):
            return record.end - record.start
        self._tree.free(slots)
        return 0

    def adopt_tail(self, record: SegmentRecord, extra_key: str | None, cache_salt: str | None) -> bool:
        """Give a loaded segment's tail slots and a node; False: it has no tail, or there is no place."""
        if record.tail_tokens is None:
            return False
        assert record.tail_k is not None and record.tail_v is not None
        slots = self._tree.alloc(record.tail_tokens.numel())
        if slots is None:
            return False
        path: list[int] = record.tokens.tolist()
        tokens: list[int] = path + record.tail_tokens.tolist()
        with accounting():
            there = self._tree.find(tokens, extra_key, cache_salt)
            is_free = length_of(there) == len(path) == self._spans.waterline(there)
            if not is_free or self._tree.add(tokens, extra_key, cache_salt, slots) is None:
                self._tree.free(slots)
                return False
            self._packer.place_tokens(slots, record.tail_k, record.tail_v)
        return True

    @accounting()
    def _install(
        self,
        record: SegmentRecord,
        tokens: Sequence[int],
        slots: Tensor,
        extra_key: str | None,
        cache_salt: str | None,
    ) -> bool:
        there = self._tree.find(tokens, extra_key, cache_salt)
        if not self._fits(record, there):
            return False
        ordinary = self._spans.uncompressed(there)
        if not record.splittable and not self._is_whole(ordinary):
            return False
        readers = self._readers.movable(ordinary[0]) if ordinary else []
        if readers is None:
            return False
        last = self._tree.add(tokens, extra_key, cache_salt)
        if last is None:
            return False
        freed = self._tree.token_slots(ordinary) if ordinary else slots[:0]
        nodes = self._spans.uncompressed(path_to(last))
        self._ranges.install(nodes, self._segment(record, slots), freed, readers)
        return True

    def _is_whole(self, nodes: Sequence[Node]) -> bool:
        """Whether no request reads the last nodes of a path, and no prompt branches off from them.

        Otherwise a request would read only the beginning of an unsplittable segment.
        """
        return all(
            self._tree.num_locks(node) == 0 and all(child is below for child in node.children.values())
            for node, below in zip_longest(nodes, nodes[1:])
        )

    def _fits(self, record: SegmentRecord, there: Sequence[Node]) -> bool:
        """Whether a segment begins at the path's waterline and ends beyond the path."""
        return length_of(there) < record.end and self._spans.waterline(there) == record.start

    def _segment(self, record: SegmentRecord, slots: Tensor) -> Segment:
        segment = self._packer.new_segment(
            slots,
            record.keep_lens,
            record.positions,
            record.start,
            record.end,
            splittable=record.splittable,
            worth=record.worth,
        )
        self._packer.place(segment, record.k, record.v, record.biases)
        segment.is_measured = record.is_read
        if record.policy_state is not None:
            segment.policy_state = PolicyState(record.policy_state.to(slots.device))
        return segment


class Loading(Part):
    """Fetches prefixes for requests at the head of the queue, and puts them into the tree.

    Tensor-parallel ranks have the same queue and tree, and each reads its own part of a prefix. They agree on each
    prefix: all load it, or none. After an error the prefix is computed.
    """

    def __init__(self, shared: Shared, adoption: Adoption, access: StoreAccess, reader: ReadAhead) -> None:
        super().__init__(shared)
        self._adoption = adoption
        self._access = access
        self._reader = reader
        self._waiting: WeakKeyDictionary[Any, Waiting] = WeakKeyDictionary()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their prefix, or for their turn to fetch it."""
        return len(self._waiting)

    def clear(self) -> None:
        """Let waiting requests go on without the store."""
        for waiting in tuple(self._waiting.values()):
            if waiting.fetch is not None:
                self._reader.abandon(waiting.fetch)
        self._waiting.clear()

    def queued(self, request: Any, prompt: Prompt) -> None:
        """Register a queued request, if the store may have its prefix."""
        identity = self._access.identity
        if self._access.uses(prompt.extra_key) and prompt.num_tokens >= identity.min_prefix_tokens:
            self._waiting[request] = Waiting(prompt, self._reader.deadline())

    def settle(self, queue: Sequence[Any]) -> set[Any]:
        """Put fetched prefixes into the tree, and start fetches for requests at the head of the queue.

        Called between two steps, on all ranks, with the requests that wait for admission, in order.

        Returns:
            Requests that must not be admitted yet.
        """
        if not self._waiting:
            return set()
        for request in queue[:READ_AHEAD]:
            waiting = self._waiting.get(request)
            if waiting is not None and not waiting.is_begun:
                self._begin(waiting)
        there = {request: self._waiting[request] for request in queue[:MAX_LOOKED_AT] if request in self._waiting}
        still = set()
        for (request, waiting), answer in zip(there.items(), self._agree(list(there.values())), strict=True):
            if answer is Answer.COMING:
                still.add(request)
            elif waiting.is_begun:
                del self._waiting[request]
                self._end(waiting, answer)
        return still

    def _begin(self, waiting: Waiting) -> None:
        """Start a fetch if the store may have more of a prompt than the tree."""
        waiting.is_begun = True
        prompt = waiting.prompt
        with self._guard.at(Place.STORE):
            tokens = list(prompt.tokens[: prompt.num_tokens])
            path = self._tree.find(tokens, prompt.extra_key, prompt.cache_salt)
            namespace = self._access.identity.namespace(prompt.extra_key, prompt.cache_salt)
            waiting.fetch = self._reader.start(Wanted(tokens, namespace, self._spans.waterline(path), length_of(path)))

    def _agree(self, waiting: Sequence[Waiting]) -> list[Answer]:
        """Combine all ranks' answers, with the same result on each."""
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
        """Place what was fetched for a request that waits no longer, or report why there is nothing."""
        if waiting.fetch is None:
            return
        if answer is Answer.LATE:
            self._table.listener.load_failed(LOAD_LATE)
        for error in tuple(waiting.fetch.errors):
            self._table.listener.load_failed(LOAD_ERROR, error)
        if answer is Answer.HERE:
            with self._guard.at(Place.STORE):
                self._place(waiting.fetch.records, waiting.prompt)
        else:
            self._reader.abandon(waiting.fetch)

    def _place(self, records: Sequence[SegmentRecord], prompt: Prompt) -> None:
        for record in records:
            num_tokens = self._adoption.adopt(record, prompt.extra_key, prompt.cache_salt)
            if num_tokens == 0:
                self._table.listener.load_failed(LOAD_NO_PLACE)
                continue
            if record.tail_tokens is not None and _goes_on(prompt, record):
                self._adoption.adopt_tail(record, prompt.extra_key, prompt.cache_salt)
            self._table.listener.loaded(record.key, record.end - num_tokens, record.end)


def _goes_on(prompt: Prompt, record: SegmentRecord) -> bool:
    """Whether a prompt continues a segment's path with the first token of its tail."""
    assert record.tail_tokens is not None
    if prompt.num_tokens <= record.end:
        return False
    return list(prompt.tokens[: record.end + 1]) == [*record.tokens.tolist(), int(record.tail_tokens[0])]


def _signature(waiting: Waiting) -> int:
    """Checksum that is equal on ranks that fetched their parts of the same prefix."""
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
    """Checksum of tokens: paths of the same length may differ."""
    return 0 if tokens is None else zlib.crc32(tokens.numpy().tobytes())
