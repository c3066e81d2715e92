"""SGLang's unified radix tree with compressed nodes: same keys, same matching, fewer token slots."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.evict_policy import LRUStrategy
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode as TreeNode
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_kvevict.compression import Compressor, PromptObservation, ReaderChunk, ReaderObservation
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.prefix import Segment, Span, SpanStore
from sgl_kvevict.ragged import SpanRuns
from sgl_kvevict.sglang_adapter.access_clock import AccessClock, access_counter
from sgl_kvevict.sglang_adapter.eviction import CostAwareRecency
from sgl_kvevict.sglang_adapter.introspection import cache_state
from sgl_kvevict.sglang_adapter.observers import REFUSED_IN_USE, REFUSED_NOT_CACHED, CacheObserver
from sgl_kvevict.sglang_adapter.pending import PendingRange, PendingRanges
from sgl_kvevict.sglang_adapter.ranks import TensorRanks
from sgl_kvevict.sglang_adapter.scoring import PrefixScoring
from sgl_kvevict.sglang_adapter.span_component import FULL, SpanComponent

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

class KVEvictTree(UnifiedRadixCache):
    """Unified tree whose nodes may hold spans.

    Args:
        params: SGLang's construction parameters.
        store: writes and repacks segments.
        compressor: compresses completed prompts; None (policy ``none``) leaves the tree as stock.

    Attributes:
        observer: told of every change; does nothing unless events or metrics are on.
        scoring: has prefixes read before they are compressed; None for policies that need no readers.
        ranks: the tensor-parallel ranks that hold the same tree.
        clock: how long ago a node was used.
    """

    def __init__(self, params: CacheInitParams, store: SpanStore, compressor: Compressor | None) -> None:
        self.store = store
        self.compressor = compressor
        self.spans: dict[TreeNode, Span] = {}
        self.pending = PendingRanges()
        self.requests: WeakValueDictionary[str, Req] = WeakValueDictionary()
        self._observations: WeakKeyDictionary[Req, PromptObservation] = WeakKeyDictionary()
        self.max_sharers = 0
        self.ranks = TensorRanks(params.attn_tp_cache_group)
        self.observer = CacheObserver()
        readers = None if compressor is None else compressor.policy.readers
        self.scoring: PrefixScoring | None = None
        self.clock = AccessClock()
        # SGLang's constructor calls reset, so what that touches exists by now.
        params.component_registry_override = {**(params.component_registry_override or {}), FULL: SpanComponent}
        super().__init__(params)
        self.scoring = None if readers is None else PrefixScoring(self, readers)
        if isinstance(self.tree_core.eviction_strategy, LRUStrategy):  # what else a user chose is followed as it is
            self.tree_core.eviction_strategy = CostAwareRecency(self.spans, access_counter)

    def reset(self) -> None:
        """Forget everything; SGLang clears allocator and rows itself."""
        self.spans.clear()
        self.pending.clear()
        self._observations.clear()
        if self.scoring is not None:
            self.scoring.clear()
        super().reset()
        self.observer.cleared()

    # ---- walks ----

    def nodes(self) -> Iterator[TreeNode]:
        """All nodes below the root, in no particular order."""
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def node(self, handle: TreeNode | int) -> TreeNode:
        """Resolve SGLang's number of a node."""
        return self.tree_core.node_by_id(handle) if isinstance(handle, int) else handle

    def path(self, handle: TreeNode | int) -> list[TreeNode]:
        """Nodes from below the root to a node."""
        node, path = self.node(handle), []
        while node is not self.root_node:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def waterline(self, path: list[TreeNode]) -> int:
        """Tokens of a path that its spans stand for."""
        return sum(len(node.key) for node in path if node in self.spans)

    def node_ending_at(self, path: list[TreeNode], end: int) -> TreeNode:
        """Return the node of the path that ends at ``end``, splitting one if needed."""
        position = 0
        for node in path:
            position += len(node.key)
            if position == end:
                return node
            if position > end:
                tokens = array("q", [token for step in path for token in step.key.token_ids][:end])
                self.touch_prefix(RadixKey(tokens, node.key.extra_key, cache_salt=node.key.cache_salt))  # splits there
                return node.parent
        raise InvariantError(f"the path has {position} tokens, expected at least {end}")

    @staticmethod
    def readers_of(node: TreeNode) -> int:
        """Requests that lock a node."""
        return int(node.component_data[FULL].lock_ref)

    def node_slots(self, node: TreeNode) -> int:
        """Token slots that a node carries in the accounting."""
        return int(self.components[FULL].reclaimable_value_len(node))

    def total_size(self) -> tuple[int, int]:
        """Token slots of the tree, and of its other components."""
        return sum(self.node_slots(node) for node in self.nodes()), super().total_size()[1]

    def all_values_flatten(self) -> torch.Tensor:
        """Every token slot that the tree holds; for SGLang's leak checker."""
        held = [node.component_data[FULL].value for node in self.nodes() if node not in self.spans]
        held += [span.segment.token_slots for span in self.spans.values() if span.is_owner]
        return torch.cat(held) if held else torch.tensor([], dtype=torch.int64)

    # ---- matching ----

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match as stock; a request that matches (again) is about to be prefilled, so remember it by its id."""
        if params.req is not None:
            self.requests[params.req.rid] = params.req
            if self.compressor is not None:
                self._observations[params.req] = self.compressor.new_observation()
        blocked = self._blocking_node(params.key)
        if blocked is not None:
            params = replace(params, key=params.key[: self.spans[blocked].start])
        return super().match_prefix(params)

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert as stock; SGLang's split at the prompt's end is left out where it would cut an unsplittable span."""
        if self._blocking_node(params.key) is not None:
            return InsertResult(prefix_len=len(params.key))
        return super().insert(params)

    # ---- what happens to nodes ------------------------------------------------------------------------------

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """A node was cut; ``lower`` is the node that it was."""
        if self.scoring is not None:
            self.scoring.split(upper, lower)
        span = self.spans.get(lower)
        if span is not None:
            self.spans[upper], self.spans[lower] = span.split(span.start + len(upper.key))
            self.observer.split(upper, lower, self.spans[lower].start)

    def on_drop(self, node: TreeNode) -> torch.Tensor | None:
        """A leaf leaves the tree.

        Returns:
            Token slots that come back; None: the node held no span, so they are those of its value.
        """
        self.pending.discard(node)
        if self.scoring is not None:
            self.scoring.discard(node)
        strategy = self.tree_core.eviction_strategy
        if isinstance(strategy, CostAwareRecency):
            strategy.dropped(strategy.get_priority(node))
        span = self.spans.pop(node, None)
        slots = None if span is None else span.drop()
        released = len(node.key) if span is None else 0 if slots is None else slots.numel()
        self.observer.dropped(node, span, released)
        return slots if span is None or slots is not None else self._repack(node.parent, span.segment)

    def _repack(self, lowest: TreeNode, segment: Segment) -> torch.Tensor:
        """Shrink a segment whose lowest span was dropped; return the token slots that came back."""
        nodes = []
        node = lowest
        while (span := self.spans.get(node)) is not None and span.segment is segment:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        freed = self.store.repack([self.spans[node] for node in nodes], self.ranks.largest)
        self.tree_core.adjust_component_size(nodes[0].id, FULL, -freed.numel())
        self.observer.repacked(nodes[0], self.spans[nodes[0]].segment, freed.numel())
        return freed

    def _drop(self, node: TreeNode) -> None:
        for kind, slots in self.tree_core.evict_device_leaf(node.id, is_write_back=False).device_frees.items():
            self.components[kind].apply_component_action(FreeComponentDeviceSlot(slots, kind))

    def _blocking_node(self, key: RadixKey) -> TreeNode | None:
        """Return the unsplittable node inside which ``key`` ends or diverges, if there is one."""
        if self.compressor is None or self.compressor.policy.splittable:
            return None
        node, rest = self.root_node, key
        while len(rest) and (child := node.children.get(rest.child_key(self.page_size))) is not None:
            matched = child.key.match(rest, page_size=self.page_size)
            if matched < len(child.key):
                span = self.spans.get(child)
                return child if span is not None and not span.segment.splittable else None
            node, rest = child, rest[matched:]
        return None

    # ---- life of a request ----------------------------------------------------------------------------------

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Insert as stock, then compress what the completed prompt made compressible.

        A prompt that ends or diverges inside an unsplittable span takes its place if nobody reads it, else the
        prompt is not cached: its slots stay the request's own.
        """
        if self.disable or not self._make_way(req, up_to):
            return
        super().checkpoint(req, up_to=up_to, **kwargs)
        observation = self._observations.get(req)
        if observation is not None and observation.is_complete:
            del self._observations[req]
            if self.scoring is not None:
                self.scoring.prompt_complete(req, observation)
            else:
                end = min(observation.end, sum(len(node.key) for node in self.path(req.last_node)))
                self.compress_up_to(req.last_node, end - self._tail_tokens, observation, req.rid)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """A request let go of its path: forget its state and compress ranges that waited for it."""
        super().on_release(req, checkpointed=checkpointed)
        self._observations.pop(req, None)
        self.requests.pop(req.rid, None)
        if self.scoring is not None:
            self.scoring.released(req)
        for pending in self.pending:
            self._try_compress(pending)

    def _make_way(self, req: Req, up_to: int) -> bool:
        tokens: array[int] = req.full_untruncated_fill_ids[:up_to]
        blocking = self._blocking_node(RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt))
        if blocking is None:
            return True
        if self.readers_of(blocking) > 0:
            self.observer.refused(REFUSED_NOT_CACHED, len(tokens))
            return False
        subtree = [blocking]
        for node in subtree:
            subtree.extend(node.children.values())
        for node in reversed(subtree):
            self._drop(node)
        return True

    # ---- compression ----------------------------------------------------------------------------------------

    @property
    def _tail_tokens(self) -> int:
        assert self.compressor is not None
        return self.compressor.config.tail_tokens

    def compress_up_to(
        self, node: TreeNode, end: int, observation: PromptObservation | ReaderObservation, rid: str
    ) -> bool:
        """Compress what is uncompressed of the path to a node, or remember to, once nobody else reads it.

        Args:
            node: the path's last node.
            end: logical position up to which to compress.
            observation: what to compress with.
            rid: the request that was observed; its own lock does not stand in the way.

        Returns:
            Whether the range is done with (it may also have been too short).
        """
        assert self.compressor is not None
        path = self.path(node)
        num_tokens = end - self.waterline(path)
        if num_tokens < self.compressor.config.min_prefix_tokens:
            return True
        pending = PendingRange(self.node_ending_at(path, end), end, observation, rid)
        if self._try_compress(pending):
            return True
        self.pending.add(pending)
        self.observer.refused(REFUSED_IN_USE, num_tokens)
        return False

    def _try_compress(self, pending: PendingRange) -> bool:
        """Compress a range unless somebody else reads it; return whether the range is done with."""
        assert self.compressor is not None
        path = self.path(pending.node)
        waterline = self.waterline(path)
        if pending.end - waterline < self.compressor.config.min_prefix_tokens:
            self.pending.discard(pending.node)
            return True
        nodes = [node for node in path if node not in self.spans]
        holder = self._holder(pending)
        if self.readers_of(nodes[0]) > (0 if holder is None else 1):
            return False
        groups = [nodes] if self.compressor.policy.splittable else [[node] for node in nodes]
        for group in groups:
            self._compress(group, waterline, pending.observation)
            waterline += sum(len(node.key) for node in group)
        if holder is not None:
            self.req_to_token_pool.write((holder.kv.req_pool_idx, slice(0, pending.end)), 0)
        return True

    def _holder(self, pending: PendingRange) -> Req | None:
        """Return the request that was observed if it still locks the range itself."""
        req = self.requests.get(pending.rid)
        if req is None or req.lock is None or pending.node not in self.path(req.lock.node):
            return None
        return req

    def _compress(self, nodes: list[TreeNode], start: int, observation: PromptObservation | ReaderObservation) -> None:
        """Replace the ordinary slots of consecutive nodes by spans of one new segment."""
        assert self.compressor is not None
        token_slots = torch.cat([node.component_data[FULL].value for node in nodes])
        above = self.spans.get(nodes[0].parent)
        parent = None if above is None else above.segment
        done = self.compressor.compress(token_slots, start, observation, parent)
        rest = Span(done.segment, start, start + token_slots.numel(), is_owner=True)
        for node in nodes:
            boundary = rest.start + len(node.key)
            span, rest = rest.split(boundary) if boundary < rest.end else (rest, rest)
            self.tree_core.adjust_component_size(node.id, FULL, span.charged_slots - len(node.key))
            self.spans[node] = span
            self.pending.discard(node)
            node.component_data[FULL].value = torch.zeros_like(node.component_data[FULL].value)
        self.components[FULL].apply_component_action(FreeComponentDeviceSlot([done.freed], FULL))
        self.observer.compressed(nodes, done)

    # ---- readers --------------------------------------------------------------------------------------------

    def read_paths(self, rids: list[str]) -> tuple[tuple[SpanRuns, ...], ...]:
        """Resolve what each request of a batch reads now: the spans on its path, root first.

        Always from the tree, never remembered: other requests may have split nodes of the path since.

        Args:
            rids: ids of the batch's requests.
        """
        paths = []
        for rid in rids:
            spans = [self.spans[node] for node in self.path(self.requests[rid].last_node) if node in self.spans]
            paths.append(tuple(span.runs() for span in spans))
        readers = Counter(runs for path in paths for runs in path)
        self.max_sharers = max(self.max_sharers, *readers.values(), 0)
        return tuple(paths)

    def observe(self, rid: str, start: int, end: int) -> list[PromptObservation | ReaderChunk]:
        """Return the observations that a prefill chunk ``[start, end)`` of a request adds to.

        Returns:
            None of them for rows that are not prefill (decode rows of a mixed batch), when the policy is ``none``,
            and for prompts too short to compress.
        """
        req = self.requests[rid]
        observation = self._observations.get(req)
        if self.compressor is None or observation is None or observation.is_complete:
            return []
        prompt_len = len(req.full_untruncated_fill_ids)
        config = self.compressor.config
        if self.scoring is None and prompt_len < config.min_prefix_tokens + config.tail_tokens:
            return []
        waterline = self.waterline(self.path(req.last_node))
        slots = None
        if observation.needs_slots:
            slots = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, waterline:end].long()
        observation.begin_chunk(start, end, is_last=end >= prompt_len, key_start=waterline, token_slots=slots)
        if self.scoring is not None and (reader := self.scoring.observe(req, start, end)) is not None:
            return [reader]
        return [observation] if observation.records else []

    def state(self) -> dict[str, Any]:
        """Return what the cache holds, in plain numbers (shown by ``GET /server_info``)."""
        return cache_state(self)
