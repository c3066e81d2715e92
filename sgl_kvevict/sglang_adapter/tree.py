"""SGLang's radix tree with compressed nodes: same keys, same matching, fewer token slots.

A compressed node keeps its key; its value is a filler of zeros (the padding slot), because nothing in SGLang reads
the row of a cached prefix except attention, and ours reads spans. Lengths therefore stay logical everywhere in the
stock code, and only the sizes that feed admission and the leak check are overridden: they count token slots held.
"""

from __future__ import annotations

import heapq
import time
from array import array
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.evict_policy import EvictionStrategy, LRUStrategy
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sgl_kvevict.compression import Compression, Compressor, PromptObservation, ReaderObservation
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.guard import Guard, Place, accounting
from sgl_kvevict.prefix import Segment, Span, SpanStore
from sgl_kvevict.sglang_adapter.blocking import BlockingNodes
from sgl_kvevict.sglang_adapter.eviction import CostAwareRecency
from sgl_kvevict.sglang_adapter.introspection import cache_state
from sgl_kvevict.sglang_adapter.observers import REFUSED_IN_USE, REFUSED_NO_MEMORY, REFUSED_NOT_CACHED, CacheObserver
from sgl_kvevict.sglang_adapter.pending import PendingRange, PendingRanges
from sgl_kvevict.sglang_adapter.ranks import TensorRanks
from sgl_kvevict.sglang_adapter.readable import ReadableTree
from sgl_kvevict.sglang_adapter.scoring import PrefixScoring

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


class KVEvictTree(ReadableTree):
    """Radix tree whose nodes may hold spans.

    Args:
        params: SGLang's construction parameters.
        store: writes and repacks segments.
        compressor: compresses completed prompts; None (policy ``none``) leaves the tree as stock.

    Attributes:
        observer: told of every change; does nothing unless events or metrics are on.
        scoring: has prefixes read before they are compressed; None for policies that need no readers.
        ranks: the tensor-parallel ranks that hold the same tree.
        guard: holds errors that concern one request or job.
    """

    eviction_strategy: EvictionStrategy

    def __init__(self, params: CacheInitParams, store: SpanStore, compressor: Compressor | None) -> None:
        self.store = store
        self.compressor = compressor
        self.spans: dict[TreeNode, Span] = {}
        self.pending = PendingRanges(0 if compressor is None else compressor.config.observation_bytes)
        self.blocking = BlockingNodes(self)
        self.requests: WeakSet[Req] = WeakSet()
        self._observations: WeakKeyDictionary[Req, PromptObservation] = WeakKeyDictionary()
        self.max_sharers = 0
        self.ranks = TensorRanks(params.attn_tp_cache_group)
        self.guard = Guard(self.ranks.size)
        self.observer = CacheObserver()
        readers = None if compressor is None else compressor.policy.readers
        self.scoring = None if readers is None else PrefixScoring(self, readers)
        super().__init__(params)
        if isinstance(self.eviction_strategy, LRUStrategy):  # any other policy that a user chose is followed as it is
            self.eviction_strategy = CostAwareRecency(self.spans)

    def reset(self) -> None:
        """Forget everything; SGLang clears allocator and rows itself."""
        self.spans.clear()
        self.pending.clear()
        self.blocking.clear()
        self._observations.clear()
        if self.scoring is not None:
            self.scoring.clear()
        super().reset()
        self.observer.cleared()

    @accounting()
    def forget_compressed(self) -> None:
        """The weights changed: nothing that was compressed, scored or observed before is used for a new request."""
        self.pending.clear()
        self._observations.clear()
        if self.scoring is not None:
            self.scoring.clear()
        self.blocking.add_compressed()

    # ---- sizes in token slots -------------------------------------------------------------------------------

    def node_slots(self, node: TreeNode) -> int:
        """Token slots that a node carries in the accounting."""
        span = self.spans.get(node)
        return len(node.key) if span is None else span.charged_slots

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Lock the path to ``node``; as stock, in token slots."""
        return IncLockRefResult(delta=self._lock_path(node, +1))

    def dec_lock_ref(self, node: TreeNode, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Unlock the path to ``node``; as stock, in token slots."""
        return DecLockRefResult(delta=self._lock_path(node, -1))

    def _lock_path(self, node: TreeNode, step: int) -> int:
        if self.disable:
            return 0
        moved = 0
        while node is not self.root_node:
            if node.lock_ref + step < 0 or node.parent is None:
                raise InvariantError(f"a lock was released twice, or belongs to another tree: {node.key}")
            was_locked = node.lock_ref > 0
            node.lock_ref += step
            if was_locked != (node.lock_ref > 0):
                moved -= step * self.node_slots(node)
            self._update_leaf_status(node)
            node = node.parent
        self.evictable_size_ += moved
        self.protected_size_ -= moved
        return moved

    def _charge(self, node: TreeNode, slots: int) -> None:
        """Add ``slots`` (may be negative) to the side of the accounting on which ``node`` is."""
        if node.lock_ref > 0:
            self.protected_size_ += slots
        else:
            self.evictable_size_ += slots

    def _total_size_helper(self) -> int:
        return sum(self.node_slots(node) for node in self.nodes())

    # ---- structure ------------------------------------------------------------------------------------------

    @accounting()
    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        upper: TreeNode = super()._split_node(key, child, split_len)
        if self.scoring is not None:
            self.scoring.split(upper, child)
        span = self.spans.get(child)
        if span is not None:
            self.spans[upper], self.spans[child] = span.split(span.start + split_len)
            self.observer.split(upper, child, self.spans[child].start)
        return upper

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match as stock; a request that matches (again) is about to be prefilled, so remember it."""
        if params.req is not None:
            self.requests.add(params.req)
            if self.compressor is not None:
                self._observations[params.req] = self.compressor.new_observation()
        return super().match_prefix(params)

    def _match_prefix_helper(self, node: TreeNode, key: RadixKey) -> tuple[list[torch.Tensor], TreeNode]:
        blocked = self.blocking.find(key)
        if blocked is not None:
            key = key[: self.spans[blocked].start]
            if len(key) == 0:
                return [], node
        values, last = super()._match_prefix_helper(node, key)
        return values, last

    def evict(self, params: EvictParams) -> EvictResult:
        """Drop leaves in the order of the eviction policy until ``num_tokens`` token slots are released."""
        if self.disable:
            return EvictResult()
        start_time = time.perf_counter()
        strategy = self.eviction_strategy
        heap = [(strategy.get_priority(node), node) for node in self.evictable_leaves]
        heapq.heapify(heap)
        released = 0
        while released < params.num_tokens and heap:
            priority, node = heapq.heappop(heap)
            parent = node.parent
            released += self._drop(node)
            if isinstance(strategy, CostAwareRecency):
                strategy.dropped(priority)
            if not parent.children and parent.lock_ref == 0:
                heapq.heappush(heap, (strategy.get_priority(parent), parent))
        self.update_eviction_metrics(released, start_time)
        return EvictResult(num_tokens_evicted=released)

    def _drop(self, node: TreeNode) -> int:
        """Remove one leaf; return the token slots that came back."""
        self._delete_leaf(node)
        self.pending.discard(node)
        self.blocking.discard(node)
        if self.scoring is not None:
            self.scoring.discard(node)
        self.kv_events.record_remove(node)
        span = self.spans.pop(node, None)
        slots = node.value if span is None else span.drop()
        self.observer.dropped(node, span, 0 if slots is None else slots.numel())
        if slots is None:
            assert span is not None
            return self._repack(node.parent, span.segment)
        self.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)
        return slots.numel()

    def _delete_leaf(self, node: TreeNode) -> None:
        # The stock method takes len(key) off the evictable size; a leaf that is dropped is never locked.
        self.evictable_size_ += len(node.key) - self.node_slots(node)
        super()._delete_leaf(node)

    def _repack(self, lowest: TreeNode, segment: Segment) -> int:
        """Shrink a segment whose lowest span was dropped; return the token slots that came back."""
        nodes = []
        node = lowest
        while (span := self.spans.get(node)) is not None and span.segment is segment:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        freed = self.store.repack([self.spans[node] for node in nodes], self.ranks.largest)
        self._charge(nodes[0], -freed.numel())
        self.token_to_kv_pool_allocator.free_segment(freed, start_pos=0)
        self.observer.repacked(nodes[0], self.spans[nodes[0]].segment, freed.numel())
        return freed.numel()

    # ---- life of a request ----------------------------------------------------------------------------------

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Insert as stock, then compress what the completed prompt made compressible.

        A prompt that ends or diverges inside an unsplittable span takes its place if nobody reads it, else the
        prompt is not cached: its slots stay the request's own.
        """
        if self.disable or self._keeps_own_chunks(req, up_to) or not self._make_way(req, up_to):
            return
        super().checkpoint(req, up_to=up_to)
        observation = self._observations.get(req)
        if observation is None or not observation.is_complete:
            return
        del self._observations[req]
        with self.guard.at(Place.PROMPT):
            if self.scoring is not None:
                self.scoring.prompt_complete(req, observation)
            else:
                self.compress_up_to(req.last_node, observation.end - self._tail_tokens, observation, req)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """A request let go of its path: forget its state and compress ranges that waited for it."""
        self._observations.pop(req, None)
        self.requests.discard(req)
        self.blocking.drop_unread()
        with self.guard.at(Place.RELEASE):
            if self.scoring is not None:
                self.scoring.released(req)
            for pending in self.pending:
                self._try_compress(pending)

    @staticmethod
    def _keeps_own_chunks(req: Req, up_to: int) -> bool:
        """Whether a chunk of a prompt is cached only with the whole prompt, because log-probabilities of it are wanted.

        From ``logprob_start_len`` on nothing is taken from the cache. A chunk that were cached would be exchanged for
        the compressed prefix that is there already, and the next chunk's log-probabilities would be those of that.
        """
        return bool(req.return_logprob and 0 <= req.logprob_start_len < up_to < len(req.origin_input_ids))

    def _make_way(self, req: Req, up_to: int) -> bool:
        tokens: array[int] = req.full_untruncated_fill_ids[:up_to]
        blocking = self.blocking.find(RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt))
        if blocking is None or self.blocking.drop_subtree(blocking):
            return True
        self.observer.refused(REFUSED_NOT_CACHED, len(tokens))
        return False

    # ---- compression ----------------------------------------------------------------------------------------

    @property
    def _tail_tokens(self) -> int:
        assert self.compressor is not None
        return self.compressor.config.tail_tokens

    def compress_up_to(
        self, node: TreeNode, end: int, observation: PromptObservation | ReaderObservation, req: Req
    ) -> bool:
        """Compress what is uncompressed of the path to a node, or remember to, once nobody else reads it.

        Args:
            node: the path's last node.
            end: logical position up to which to compress.
            observation: what to compress with.
            req: the request that was observed; its own lock does not stand in the way.

        Returns:
            Whether the range is done with (it may also have been too short).
        """
        assert self.compressor is not None
        path = self.path(node)
        num_tokens = end - self.waterline(path)
        if num_tokens < self.compressor.config.min_prefix_tokens:
            return True
        pending = PendingRange(self.node_ending_at(path, end), end, observation, ref(req))
        if self._try_compress(pending):
            return True
        for gone in self.pending.add(pending):
            self.observer.refused(REFUSED_NO_MEMORY, gone.end)
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
        if nodes[0].lock_ref > (0 if holder is None else 1):
            return False
        groups = [nodes] if self.compressor.policy.splittable else [[node] for node in nodes]
        for group in groups:
            done = self._decide(group, waterline, pending.observation)
            if done is None:
                self.pending.discard(pending.node)
                break
            self._install(group, done)
            waterline += done.num_tokens
        if holder is not None:
            self.req_to_token_pool.write((holder.kv.req_pool_idx, slice(0, waterline)), 0)
        return True

    def _holder(self, pending: PendingRange) -> Req | None:
        """Return the request that was observed if it still locks the range itself."""
        req = pending.reader()
        if req is None or req.lock is None or pending.node not in self.path(req.lock.node):
            return None
        return req

    def _decide(
        self, nodes: list[TreeNode], start: int, observation: PromptObservation | ReaderObservation
    ) -> Compression | None:
        """Write what is kept of consecutive nodes into the first of their slots; None if the policy failed."""
        assert self.compressor is not None
        above = self.spans.get(nodes[0].parent)
        with self.guard.at(Place.COMPRESSION):
            token_slots = torch.cat([node.value for node in nodes])
            parent = None if above is None else above.segment
            return self.compressor.compress(token_slots, start, observation, parent)
        return None

    @accounting()
    def _install(self, nodes: list[TreeNode], done: Compression) -> None:
        """Replace the ordinary slots of consecutive nodes by spans of one new segment."""
        rest = Span(done.segment, done.start, done.start + done.num_tokens, is_owner=True)
        for node in nodes:
            boundary = rest.start + len(node.key)
            span, rest = rest.split(boundary) if boundary < rest.end else (rest, rest)
            self._charge(node, span.charged_slots - len(node.key))
            self.spans[node] = span
            self.pending.discard(node)
            node.value = torch.zeros_like(node.value)
        self.token_to_kv_pool_allocator.free_segment(done.freed, start_pos=0)
        self.observer.compressed(nodes, done)

    def state(self) -> dict[str, Any]:
        """Return what the cache holds, in plain numbers (shown by ``GET /server_info``)."""
        return cache_state(self)
