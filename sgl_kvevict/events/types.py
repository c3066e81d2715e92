"""What is published about the cache.

Events follow SGLang's KV-cache events: tagged msgpack maps (key ``type``), in batches ``[ts, events, attn_dp_rank]``.
Node ids are the tree's own; they never repeat while a server lives. Token ids leave the process only with
``expose_tokens``.
"""

from __future__ import annotations

import msgspec

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the message that ends a replay, as in SGLang."""


class Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Something that happened to the cache."""


class Compressed(Event):
    """A range of tokens was compressed into one segment.

    Attributes:
        nodes: ids of the nodes that hold it, root side first.
        start: logical position of the first token.
        end: logical position after the last token.
        new_tokens: tokens that were uncompressed before: fewer than the range where a segment of generated tokens grew.
        slots: token slots that the segment takes.
        released_slots: token slots that were given back.
        kept_entries: entries stored, over all layers and heads, without those that were stored before.
        evicted_entries: entries dropped.
        merged_entries: entries folded into stored ones.
        seconds: host time (on a GPU: launching only).
        policy: name of the policy.
        token_ids: the range's tokens, with ``expose_tokens`` only.
    """

    nodes: list[int]
    start: int
    end: int
    new_tokens: int
    slots: int
    released_slots: int
    kept_entries: int
    evicted_entries: int
    merged_entries: int
    seconds: float
    policy: str
    token_ids: list[int] | None = None


class Split(Event):
    """A compressed node was cut in two; nothing was copied.

    Attributes:
        upper: id of the new node, the half nearer the root.
        lower: id of the other half, the node's id until now.
        position: logical position of the cut.
    """

    upper: int
    lower: int
    position: int


class Dropped(Event):
    """A node left the tree.

    Attributes:
        node: its id.
        tokens: tokens it stood for.
        slots: token slots that came back at once (0 for a view of a segment that lives on).
        compressed: it held a span.
    """

    node: int
    tokens: int
    slots: int
    compressed: bool


class Repacked(Event):
    """A segment that had lost its lowest span was moved into fewer token slots.

    Attributes:
        node: id of the segment's topmost node.
        slots: token slots it takes now.
        released_slots: token slots that were given back.
    """

    node: int
    slots: int
    released_slots: int


class Squeezed(Event):
    """Token slots were short: a segment gave up what is worth least of it.

    Attributes:
        node: id of the segment's topmost node.
        slots: token slots it takes now.
        released_slots: token slots that were given back.
    """

    node: int
    slots: int
    released_slots: int


class ScoringPass(Event):
    """Extra forwards were run to score a range.

    Attributes:
        start: logical position of the first token scored.
        end: logical position after the last one.
        seconds: from the first forward's start to the last result.
    """

    start: int
    end: int
    seconds: float


class Refused(Event):
    """Something could not be compressed or cached.

    Attributes:
        reason: ``in-use``: somebody reads the range exactly, it waits for that one; ``not-cached``: the prompt diverges
            inside an unsplittable span that others read, so it is served but not cached; ``no-room``: prefix and
            scoring pass together exceed the model's context or the pool, so the prefix stays uncompressed;
            ``no-memory``: what was observed of the range took more than is allowed, so it stays uncompressed.
        tokens: tokens concerned.
    """

    reason: str
    tokens: int


class Stored(Event):
    """A segment was handed to the store.

    Attributes:
        key: first digits of its name.
        tokens: tokens that it stands for.
        bytes: bytes written; 0: the store had it already, or it could not be written.
        error: why it could not be written.
    """

    key: str
    tokens: int
    bytes: int
    error: str | None = None


class Loaded(Event):
    """A segment came from the store into the tree.

    Attributes:
        key: first digits of its name.
        start: logical position of the first token.
        end: logical position after the last one.
    """

    key: str
    start: int
    end: int


class LoadFailed(Event):
    """A request went on without what the store may have of its prompt.

    Attributes:
        reason: ``late``: it came too late; ``error``: the store could not be read, or the segment was corrupt;
            ``no-place``: another request had brought the segment, or there were no token slots for it.
        error: which error.
    """

    reason: str
    error: str = ""


class Cleared(Event):
    """The whole cache was flushed."""


class EventsLost(Event):
    """Events came faster than they could be published.

    Attributes:
        count: events that were dropped here.
    """

    count: int


AnyEvent = (
    Compressed
    | Split
    | Dropped
    | Repacked
    | Squeezed
    | ScoringPass
    | Refused
    | Stored
    | Loaded
    | LoadFailed
    | Cleared
    | EventsLost
)


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """One published message.

    Attributes:
        ts: when it was published (seconds since the epoch).
        events: oldest first.
        attn_dp_rank: data-parallel rank of the scheduler.
    """

    ts: float
    events: list[AnyEvent]
    attn_dp_rank: int | None = None
