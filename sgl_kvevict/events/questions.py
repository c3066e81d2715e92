"""What can be asked about the cache, and the answers: msgpack maps over the inspection socket.

A request names its kind in ``op``, a reply in ``type``. Node ids are those of the events. Token ids and namespaces
leave the process only with ``expose_tokens``.
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
    """A question; its ``op`` is the class name in lower case."""


class Describe(Request):
    """What runs here, and where it publishes."""


class Status(Request):
    """What the cache holds, totals, and the largest prefixes.

    Attributes:
        limit: rows wanted.
        sort: what "largest" means; ``age`` is the longest time unused.
    """

    limit: Annotated[int, Meta(ge=0, le=MAX_PREFIXES)] = 20
    sort: Literal["slots", "tokens", "readers", "age"] = "slots"


class Tree(Request):
    """All nodes, from the root down.

    Attributes:
        limit: nodes wanted at most; deeper ones are left out first.
    """

    limit: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 5000


class Kept(Request):
    """Which tokens each (layer, head) kept of one node. Reads the device.

    Attributes:
        node: id of a compressed node.
        bins: resolution over its tokens.
    """

    node: int
    bins: Annotated[int, Meta(ge=1, le=MAX_BINS)] = 512


class Tokens(Request):
    """The token ids of one node; refused without ``expose_tokens``.

    Attributes:
        node: id of a node.
    """

    node: int


AnyRequest = Describe | Status | Tree | Kept | Tokens


class Reply(msgspec.Struct, tag=True):
    """An answer; its ``type`` is the class name."""


class Failure(Reply):
    """The question could not be answered.

    Attributes:
        error: why, in one sentence.
    """

    error: str


class NodeGone(Failure):
    """The node that was asked about is not in the tree, or holds nothing compressed: it may have left since."""


class Description(Reply):
    """What runs here.

    Attributes:
        started: when the scheduler started (seconds since the epoch); tells one server run from the next.
        version: of this package.
        policy: name of the policy.
        budget: share of entries, or entries per head.
        num_layers: of this rank.
        num_kv_heads: of this rank.
        model: path or hub name of the model.
        tokenizer: path or hub name of its tokenizer.
        endpoint: PUB socket as configured, or None.
        replay_endpoint: replay socket as configured, or None.
        topic: first frame of event messages.
        next_seq: sequence number of the next event message.
        expose_tokens: token ids may be asked for.
    """

    started: float
    version: str
    policy: str
    budget: int | float
    num_layers: int
    num_kv_heads: int
    model: str
    tokenizer: str
    endpoint: str | None
    replay_endpoint: str | None
    topic: str
    next_seq: int
    expose_tokens: bool


class Prefix(msgspec.Struct):
    """One segment with the spans that read it.

    Attributes:
        node: id of its topmost node.
        start: logical position of its first token.
        tokens: tokens that its live spans stand for, over all branches counted once.
        slots: token slots it takes.
        spans: live spans.
        readers: running requests that read it.
        age_s: seconds since it was last matched.
    """

    node: int
    start: int
    tokens: int
    slots: int
    spans: int
    readers: int
    age_s: float


class StatusReport(Reply):
    """What the cache holds, totals, and the largest prefixes.

    Attributes:
        ts: when it was taken (seconds since the epoch).
        started: see :class:`Description`.
        gauges: what the cache holds.
        totals: counters since the start.
        prefixes: the rows asked for.
    """

    ts: float
    started: float
    gauges: Gauges
    totals: Totals
    prefixes: list[Prefix]


class TreeNode(msgspec.Struct):
    """One node of the tree.

    Attributes:
        id: its id.
        parent: its parent's id; 0 below the root.
        start: logical position of its first token.
        tokens: tokens it stands for.
        slots: token slots it holds; for a span its part of the segment, so the sum over nodes is what is held.
        kept: share of its entries that are stored (1 for an uncompressed node).
        compressed: it holds a span.
        readers: running requests whose path includes it.
        age_s: seconds since it was last matched.
        namespace: ``extra_key`` of its requests, with ``expose_tokens`` only.
    """

    id: int
    parent: int
    start: int
    tokens: int
    slots: float
    kept: float
    compressed: bool
    readers: int
    age_s: float
    namespace: str | None = None


class TreeReport(Reply):
    """The tree, parents before children.

    Attributes:
        ts: when it was taken (seconds since the epoch).
        pool: token slots by holder.
        nodes: at most as many as asked for.
        omitted: nodes left out.
    """

    ts: float
    pool: Pool
    nodes: list[TreeNode]
    omitted: int


class KeptReport(Reply):
    """Which tokens each (layer, head) kept.

    Attributes:
        node: id of the node.
        start: logical position of its first token.
        end: logical position after its last token.
        num_bins: bins; token ``t`` of the node counts in bin ``t * num_bins // tokens``.
        num_rows: layers times KV heads, layer-major.
        share: ``num_rows * num_bins`` bytes, row by row: 255 where every token of the bin was kept.
    """

    node: int
    start: int
    end: int
    num_bins: int
    num_rows: int
    share: bytes


class TokensReport(Reply):
    """Token ids of one node.

    Attributes:
        node: its id.
        token_ids: in order.
    """

    node: int
    token_ids: list[int]


AnyReply = Failure | NodeGone | Description | StatusReport | TreeReport | KeptReport | TokensReport
