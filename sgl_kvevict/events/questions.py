"""Questions about the cache and their answers: msgpack maps over the event socket.

A request's type is in ``op``, a reply's in ``type``. Node ids are the tree's, unique over a server's
life. Token ids and namespaces are sent only with ``expose_tokens``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sgl_kvevict.events.totals import Gauges, Pool, Totals

MAX_PREFIXES = 1000
MAX_NODES = 20_000
MAX_BINS = 1024


class Request(msgspec.Struct, tag_field="op", tag=str.lower, forbid_unknown_fields=True):
    """A question; ``op`` is the class name in lower case."""


class Describe(Request):
    """The server: version, policy, model, addresses."""


class Status(Request):
    """Gauges, totals and the largest prefixes."""

    limit: Annotated[int, Meta(ge=0, le=MAX_PREFIXES)] = 20  # maximum number of rows
    sort: Literal["slots", "tokens", "readers"] = "slots"  # descending


class Tree(Request):
    """All nodes, from the root down."""

    limit: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 5000  # maximum number; deeper nodes are omitted first


class Kept(Request):
    """Which tokens of a node each (layer, head) kept. Reads the device."""

    node: int  # id of a compressed node
    bins: Annotated[int, Meta(ge=1, le=MAX_BINS)] = 512  # resolution over its tokens


class Tokens(Request):
    """The token ids of one node; refused without ``expose_tokens``."""

    node: int  # id of a node


AnyRequest = Describe | Status | Tree | Kept | Tokens


class Reply(msgspec.Struct, tag=True):
    """An answer; ``type`` is the class name."""


class Failure(Reply):
    """The question could not be answered."""

    error: str  # why, in one sentence


class NodeGone(Failure):
    """The node is not in the tree, or not compressed."""


class Description(Reply):
    """The server."""

    started: float  # start of the scheduler (seconds since the epoch); identifies a run of the server
    version: str  # of this package
    policy: str  # name of the policy
    budget: float  # share of the bytes
    bits: Literal["auto", 16]  # of the rows of compressed prefixes
    slot_bytes: int  # bytes of a token slot on this rank
    num_layers: int  # of this rank
    num_kv_heads: int  # of this rank
    model: str  # path or hub name of the model
    tokenizer: str  # path or hub name of its tokenizer
    expose_tokens: bool  # token ids may be requested


class Prefix(msgspec.Struct):
    """One segment and its spans."""

    node: int  # id of its topmost node
    start: int  # logical position of its first token
    tokens: int  # tokens of its live spans; each counts once over all branches
    slots: int  # token slots it takes
    bytes: int  # of these slots
    kept: float  # share of its tokens' entries that are stored
    entries: dict[int, int]  # entries stored, over all layers and heads, by the bits of their rows
    spans: int  # live spans
    readers: int  # running requests that read it


class StatusReport(Reply):
    """Gauges, totals and the largest prefixes."""

    ts: float  # seconds since the epoch
    started: float  # see :class:`Description`
    gauges: Gauges  # what the cache holds
    totals: Totals  # counters since the start
    prefixes: list[Prefix]  # at most ``limit``


class TreeNode(msgspec.Struct):
    """One node of the tree."""

    id: int  # its id
    parent: int  # its parent's id; 0 below the root
    start: int  # logical position of its first token
    tokens: int  # length of its key
    slots: float  # token slots held; a span has its part of the segment, so the sum over nodes is exact
    bytes: float  # of these slots
    kept: float  # share of its entries that are stored; 1 if uncompressed
    entries: dict[int, int]  # entries stored, over all layers and heads, by the bits of their rows
    compressed: bool  # it holds a span
    readers: int  # running requests whose path includes it
    hits: int  # prompts inserted through it, as SGLang counts them
    namespace: str | None = None  # ``extra_key`` of its requests, with ``expose_tokens`` only


class TreeReport(Reply):
    """The tree, parents before children."""

    ts: float  # seconds since the epoch
    pool: Pool  # token slots by holder
    nodes: list[TreeNode]  # at most ``limit``
    omitted: int  # nodes left out


class KeptReport(Reply):
    """Which tokens each (layer, head) kept, and in rows of how many bits."""

    node: int  # id of the node
    start: int  # logical position of its first token
    end: int  # logical position after its last token
    num_bins: int  # token ``t`` of the node is in bin ``t * num_bins // tokens``
    num_rows: int  # layers times KV heads, layer-major
    share: bytes  # ``num_rows * num_bins`` bytes, row by row: 255 where every token of the bin was kept
    entries: dict[int, list[int]]  # by the bits of their rows: entries stored of each (layer, head), layer-major


class TokensReport(Reply):
    """Token ids of one node."""

    node: int  # its id
    token_ids: list[int]  # in order


AnyReply = Failure | NodeGone | Description | StatusReport | TreeReport | KeptReport | TokensReport
