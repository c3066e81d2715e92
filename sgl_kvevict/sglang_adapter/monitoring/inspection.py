"""Answers questions about the tree, on the scheduler's thread, between two steps."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from sgl_kvevict.cache.nodes import tokens_of
from sgl_kvevict.events.questions import (
    AnyReply,
    AnyRequest,
    Failure,
    Kept,
    KeptReport,
    NodeGone,
    Prefix,
    Status,
    StatusReport,
    Tokens,
    TokensReport,
    Tree,
    TreeNode,
    TreeReport,
)
from sgl_kvevict.events.service import EventService
from sgl_kvevict.guard import Place
from sgl_kvevict.segments.segment import Span, entries_by_head, kept_share
from sgl_kvevict.sglang_adapter.monitoring.server_info import read_gauges

if TYPE_CHECKING:
    from sgl_kvevict.sglang_adapter.tree import KVEvictTree


TURN_S = 0.05
"""Seconds after which no further question is answered in the same turn of the scheduler's loop."""
ANSWERING_SHARE = 0.2
"""Part of the time that answers take at most: requests wait meanwhile, and the socket's clients may never stop asking.
"""


class Inspection:
    """Answers waiting questions between two steps, each of them bounded by its own limit.

    After answers that took ``t`` seconds none is given for ``t * (1 / ANSWERING_SHARE - 1)`` seconds.
    """

    def __init__(
        self, tree: KVEvictTree, service: EventService, started: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tree = tree
        self._service = service
        self._started = started
        self._clock = clock
        self._next_answer = float("-inf")

    def each_turn(self) -> None:
        """Answer questions if it is time; those for which there is none left wait for a later turn."""
        begin = now = self._clock()
        if begin < self._next_answer:
            return
        for question in self._service.take_questions():
            reply: AnyReply = Failure("internal error; the server's log has it")
            with self._tree.guard.at(Place.MONITORING):
                reply = self._reply(question.request)
            self._service.answer(question, reply)
            now = self._clock()
            if now - begin >= TURN_S:
                break
        self._next_answer = now + (now - begin) * (1 / ANSWERING_SHARE - 1)

    def _reply(self, request: AnyRequest) -> AnyReply:
        tree = self._tree
        if isinstance(request, Status):
            rows = heapq.nlargest(request.limit, prefixes(tree), key=attrgetter(request.sort))
            totals = copy(tree.prefixes.totals)
            return StatusReport(time.time(), self._started, read_gauges(tree), totals, rows)
        if isinstance(request, Tree):
            return tree_report(tree, request.limit, expose_tokens=self._service.config.expose_tokens)
        if isinstance(request, Kept):
            return kept_report(tree, request)
        if isinstance(request, Tokens):
            if not self._service.config.expose_tokens:
                return Failure("token ids are not exposed; the server's configuration says events.expose_tokens=false")
            return tokens_report(tree, request.node)
        return Failure(f"cannot answer {type(request).__name__}")


def prefixes(tree: KVEvictTree) -> Iterable[Prefix]:
    """One row per segment. All spans of a segment are on one path, so each token counts once."""
    for segment, node in tree.prefixes.table.packed.items():
        num_tokens = segment.live_end - segment.start
        yield Prefix(
            node=node.id,
            start=segment.start,
            tokens=num_tokens,
            slots=segment.num_slots,
            bytes=segment.num_slots * segment.geometry.slot_bytes,
            kept=segment.num_live_entries / (num_tokens * segment.geometry.num_runs),
            entries=segment.entries_by_bits,
            spans=segment.num_spans,
            readers=tree.port.num_locks(node),
        )


def tree_report(tree: KVEvictTree, limit: int, *, expose_tokens: bool) -> TreeReport:
    """Return up to ``limit`` nodes, level by level; reads the device if a segment has several spans."""
    # Level by level, so that a limit cuts off the deepest nodes, not whole branches.
    every = tree.nodes()
    found, ends = every[:limit], {tree.root_node: 0}
    spans = [span for node in found if (span := tree.spans.get(node)) is not None]
    entries = dict(zip(spans, _entries(spans), strict=True))
    nodes, geometry = [], tree.packer.geometry
    for node in found:
        span, start = tree.spans.get(node), ends[node.parent]
        ends[node] = start + len(node.key)
        all_entries = len(node.key) * geometry.num_runs
        stored = {16: all_entries} if span is None else entries[span]
        slots = float(len(node.key)) if span is None else _slots(span, sum(stored.values()))
        nodes.append(
            TreeNode(
                id=node.id,
                parent=0 if node.parent is tree.root_node else node.parent.id,
                start=start,
                tokens=len(node.key),
                slots=slots,
                bytes=slots * geometry.slot_bytes,
                kept=sum(stored.values()) / all_entries,
                entries=stored,
                compressed=span is not None,
                readers=tree.port.num_locks(node),
                hits=node.hit_count,
                namespace=node.key.extra_key if expose_tokens else None,
            )
        )
    return TreeReport(time.time(), read_gauges(tree).pool, nodes, len(every) - len(found))


def _entries(spans: list[Span]) -> list[dict[int, int]]:
    """Entries that each span reads, by the bits of their rows; one device read for all spans with shared segments."""
    shared = [runs for span in spans if span.segment.num_spans > 1 for runs in span.runs()]
    counts = iter(torch.stack([runs.lens.sum() for runs in shared]).tolist() if shared else ())
    found: list[dict[int, int]] = []
    for span in spans:
        # A segment of one span has all its entries there, and their number is known on the host.
        is_shared = span.segment.num_spans > 1
        stored = Counter[int]() if is_shared else Counter(span.segment.entries_by_bits)
        for runs in span.runs() if is_shared else ():  # sinks, then the others
            stored[runs.bits] += next(counts)
        found.append(dict(+stored))
    return found


def _slots(span: Span, entries: int) -> float:
    """Token slots of a span of so many entries, a part of its segment's."""
    segment = span.segment
    live = segment.num_live_entries
    return segment.num_slots * entries / live if live else float(span.charged_slots)


def kept_report(tree: KVEvictTree, request: Kept) -> KeptReport | NodeGone:
    """Return which tokens of a node each (layer, head) kept. Reads the device."""
    span = next((span for node, span in tree.spans.items() if node.id == request.node), None)
    if span is None:
        return NodeGone(f"node {request.node} holds no compressed tokens (it may have left the tree)")
    share = kept_share(span, min(request.bins, span.num_tokens))
    # A byte a cell is enough for a picture, and keeps the message small.
    levels = share.mul(255).round().to(torch.uint8).cpu()
    return KeptReport(
        node=request.node,
        start=span.start,
        end=span.end,
        num_bins=share.shape[1],
        num_rows=share.shape[0],
        share=levels.numpy().tobytes(),
        entries={bits: counts.tolist() for bits, counts in entries_by_head(span).items()},
    )


def tokens_report(tree: KVEvictTree, wanted: int) -> TokensReport | NodeGone:
    """Return the token ids of one node."""
    node = next((node for node in tree.nodes() if node.id == wanted), None)
    if node is None:
        return NodeGone(f"node {wanted} is not in the tree (any more)")
    return TokensReport(wanted, tokens_of([node]).tolist())
