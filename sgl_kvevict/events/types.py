"""Published events of the cache.

Tagged msgpack maps (key ``type``), like SGLang's KV-cache events. Node ids are the tree's and unique over a server's
life. Token ids are sent only with ``expose_tokens``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FOLLOW_S = 30.0
"""Seconds for which a client gets events after it asked to follow; it asks again in time."""


def short_key(key: str) -> str:
    """The first digits of a segment's name: the whole name would be a digest of tokens and salt."""
    return key[:16]


class Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """A change of the cache."""


class Compressed(Event):
    """A range of tokens was compressed into one segment."""

    nodes: list[int]  # ids of the nodes that hold it, root side first
    start: int  # logical position of the first token
    end: int  # logical position after the last token
    new_tokens: int  # tokens that were uncompressed: all, or none if packed segments became one
    slots: int  # token slots that the segment takes
    released_slots: int  # token slots that were given back
    bytes: int  # of the slots that it takes
    entries: dict[int, int]  # entries stored now, over all layers and heads, by the bits of their rows
    kept_entries: int  # the same, less those that were packed before
    evicted_entries: int  # entries neither stored nor merged
    merged_entries: int  # entries folded into stored ones
    seconds: float  # host time (on a GPU: launching only)
    policy: str  # name of the policy
    token_ids: list[int] | None = None  # the range's tokens, with ``expose_tokens`` only


class Split(Event):
    """A compressed node was cut in two, without copies."""

    upper: int  # id of the new node, the half nearer the root
    lower: int  # id of the other half, the node's id until now
    position: int  # logical position of the cut


class Dropped(Event):
    """A node left the tree."""

    node: int  # its id
    tokens: int  # length of its key
    slots: int  # token slots released at once (0 for a span whose segment lives on)
    compressed: bool  # it held a span


class Repacked(Event):
    """A segment that lost its lowest span was moved into fewer token slots."""

    node: int  # id of the segment's topmost node
    slots: int  # token slots it takes now
    released_slots: int  # token slots that were given back
    bytes: int  # of the slots that it takes now
    entries: dict[int, int]  # entries stored now, by the bits of their rows


class Squeezed(Event):
    """A segment shrank because token slots were short: rows got fewer bits, then the last entries in its order went."""

    node: int  # id of the segment's topmost node
    slots: int  # token slots it takes now
    released_slots: int  # token slots that were given back
    bytes: int  # of the slots that it takes now
    entries: dict[int, int]  # entries stored now, by the bits of their rows
    evicted_entries: int  # entries that were stored before and are not now; 0: rows got fewer bits


class PromptComplete(Event):
    """A request's prompt is prefilled."""

    tokens: int  # its length
    found: int  # tokens of it that were in the pool, the host's memory or the store


class Grown(Event):
    """Entries that had been evicted from a segment came back from the host's memory."""

    node: int  # id of the segment's topmost node
    slots: int  # token slots it takes now
    taken_slots: int  # token slots among them that it took
    bytes: int  # of the slots that it takes now
    entries: dict[int, int]  # entries stored now, by the bits of their rows
    returned_entries: int  # entries among them that came back


class PrefilledCompressed(Event):
    """A prompt is complete whose first chunks were compressed before its last one was computed."""

    tokens: int  # compressed tokens among those that it computed


class ScoringPass(Event):
    """Extra forwards scored a range."""

    start: int  # logical position of the first token scored
    end: int  # logical position after the last one
    seconds: float  # from the first forward's start to the last result


class Refused(Event):
    """A range could not be compressed, or a prompt not cached."""

    # in-use: an exact request reads the range; it is compressed when that ends.
    # not-cached: the prompt would cut an unsplittable span that others read; it is served, but not cached.
    # no-room: prefix and scoring pass exceed the model's context or the pool. no-memory: observing the range exceeds
    # ``observation_bytes``. The range stays uncompressed in both cases.
    reason: Literal["in-use", "not-cached", "no-room", "no-memory"]
    tokens: int  # tokens concerned


class Stored(Event):
    """A segment was handed to the store."""

    key: str  # first digits of its name
    tokens: int  # tokens that it stands for
    bytes: int  # bytes written; 0: the store had it already, or it could not be written
    error: str | None = None  # why it could not be written


class Loaded(Event):
    """A segment was loaded from the store into the tree."""

    key: str  # first digits of its name
    start: int  # logical position of the first token
    end: int  # logical position after the last one


class LoadFailed(Event):
    """A request continued without a segment of the store."""

    # late: the store took too long. error: it could not be read, or the segment was corrupt. no-place: another request
    # had loaded the segment, or there were no token slots for it.
    reason: Literal["late", "error", "no-place"]
    error: str = ""  # the error's text


class MovedOut(Event):
    """A segment was copied to the host's memory, because it leaves the pool."""

    key: str  # first digits of its name
    start: int  # logical position of the first token
    end: int  # logical position after the last one
    bytes: int  # memory that it takes there
    pushed_out: int = 0  # segments that left the host's memory to make room, without those that the pool has


class MovedIn(Event):
    """A segment came back from the host's memory, for a request that is admitted."""

    key: str  # first digits of its name
    start: int  # logical position of the first token that the pool lacked
    end: int  # logical position after the last one
    bytes: int  # bytes copied
    seconds: float  # host time from the look-up on (on a GPU: launching only)


class Cleared(Event):
    """The whole cache was flushed."""


AnyEvent = (
    Compressed
    | Split
    | Dropped
    | Repacked
    | Squeezed
    | PromptComplete
    | Grown
    | PrefilledCompressed
    | ScoringPass
    | Refused
    | Stored
    | Loaded
    | LoadFailed
    | MovedOut
    | MovedIn
    | Cleared
)


class EventBatch(msgspec.Struct, tag=True, gc=False):
    """One published message: consecutive events.

    Events are numbered from 0 in each run of the server, those included that nobody followed or that were lost because
    they came too fast; so numbers that do not continue the last batch's show what is missing.
    """

    first: int  # number of the first event
    started: float  # start of the scheduler (seconds since the epoch); identifies a run of the server
    ts: float  # when it was published (seconds since the epoch)
    events: list[AnyEvent]  # oldest first
    rank: int  # data-parallel rank of the scheduler

    @property
    def end(self) -> int:
        """Number of the event after the last one."""
        return self.first + len(self.events)

    def since(self, number: int) -> EventBatch:
        """The batch without the events before a number, which lies in it."""
        return EventBatch(number, self.started, self.ts, self.events[number - self.first :], self.rank)
