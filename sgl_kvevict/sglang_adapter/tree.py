"""SGLang's unified radix tree with compressed nodes: same keys, same matching, fewer token slots."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.evict_policy import LRUStrategy
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.compression import Compressor, PromptObservation, ReaderChunk
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.lifecycle import PrefixManager
from sgl_kvevict.lifecycle.listener import REFUSED_NOT_CACHED
from sgl_kvevict.lifecycle.manager import Released
from sgl_kvevict.lifecycle.nodes import path_to
from sgl_kvevict.prefix import SegmentPacker
from sgl_kvevict.request import RequestOptions, parse_request_options
from sgl_kvevict.sglang_adapter.access_clock import AccessClock, access_counter
from sgl_kvevict.sglang_adapter.blocking import BlockingNodes
from sgl_kvevict.sglang_adapter.kv_pools import state_slots
from sgl_kvevict.sglang_adapter.ranks import TensorRanks
from sgl_kvevict.sglang_adapter.span_component import FULL, SpanComponent
from sgl_kvevict.sglang_adapter.tree_port import UnifiedTreePort
from sgl_kvevict.sglang_adapter.window_component import SWA, SpanAwareSWA

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

logger = logging.getLogger(__name__)


class KVEvictTree(UnifiedRadixCache):
    """Unified tree whose nodes may hold spans: tells the manager what happens, which decides what follows.

    Args:
        params: SGLang's construction parameters.
        store: writes and repacks segments.
        compressor: compresses completed prompts; None (policy ``none``) leaves the tree as stock.

    Attributes:
        port: what the manager does to the tree.
        manager: follows every prefix.
        spans: what compressed nodes hold; the manager's.
        guard: holds errors that concern one request or job.
        clock: how long ago a node was used.
        pass_name: what the names of scoring passes begin with: the same on all ranks, and not to be guessed, because
            SGLang reports by name what becomes of requests that it takes off or gives up.
    """

    def __init__(self, params: CacheInitParams, store: SegmentPacker, compressor: Compressor | None) -> None:
        self.store = store
        self.compressor = compressor
        self.port = UnifiedTreePort(self, TensorRanks(params.attn_tp_cache_group))
        self.guard = Guard(self.ranks.size)
        states = state_slots(params, store.k_arena)
        self.manager = PrefixManager(self.port, store, compressor, self.guard, access_counter, states)
        self.spans = self.manager.spans
        self.clock = AccessClock()
        self.pass_name = f"kvevict-pass-{self.ranks.largest(secrets.randbits(62)):x}"
        is_splittable = compressor is None or compressor.splittable
        self._blocking = BlockingNodes(self, self.spans, splittable=is_splittable)
        self._weighs_recency = False
        # SGLang's constructor builds the components and calls reset: what they need exists by now.
        ours = {FULL: SpanComponent, SWA: SpanAwareSWA}
        params.component_registry_override = {**(params.component_registry_override or {}), **ours}
        super().__init__(params)
        self._weighs_recency = isinstance(self.tree_core.eviction_strategy, LRUStrategy)
        self._order_leaves()

    @property
    def ranks(self) -> TensorRanks:
        """The tensor-parallel ranks that hold the same tree."""
        return self.port.ranks

    def reset(self) -> None:
        """Forget everything; SGLang clears allocator and rows itself."""
        self._blocking.clear()
        self.manager.cleared()
        super().reset()
        self._order_leaves()

    def _order_leaves(self) -> None:
        """Let leaves go in our order where SGLang's default was chosen; what else a user chose is followed as it is."""
        if self._weighs_recency:
            self.components[FULL].order_by(self.manager.order)

    def forget_compressed(self) -> None:
        """The weights changed: nothing compressed, scored, observed or learned before is used for a new request."""
        compressor = self.manager.compressor
        if compressor is not None and compressor.learner is not None:
            compressor.learner.forget()
        self.manager.forget_seen()
        if self.manager.stored is not None and self.manager.stored.is_on:
            self.manager.stored.switch_off()
            logger.warning("kvevict: the weights are not those that were loaded: the store is off until a restart")
        self._blocking.add_compressed()

    # ---- nodes and sizes --------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[UnifiedTreeNode]:
        """All nodes below the root, in no particular order."""
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def num_readers(self, node: UnifiedTreeNode) -> int:
        """Requests that lock a node."""
        return self.port.num_locks(node)

    def node_slots(self, node: UnifiedTreeNode) -> int:
        """Token slots that a node carries in the accounting."""
        return int(self.components[FULL].reclaimable_value_len(node))

    def evictable_size(self) -> int:
        """Token slots that can be had at any time: of what nobody reads, and what shrinking wins of what is read."""
        return int(super().evictable_size()) + self._reserve()

    def protected_size(self) -> int:
        """Token slots that readers hold and that cannot be had while they do."""
        return int(super().protected_size()) - self._reserve()

    def held_slots(self) -> int:
        """Token slots that the tree holds: those of both sizes."""
        return int(super().evictable_size()) + int(super().protected_size())

    def full_evictable_size(self) -> int:
        """The same as :meth:`evictable_size`, by the name that SGLang uses where a pool has several parts."""
        return self.evictable_size()

    def full_protected_size(self) -> int:
        """The same as :meth:`protected_size`."""
        return self.protected_size()

    @property
    def slot_allocator(self) -> Any:
        """Who gives out the token slots that spans are made of: full attention's where the pool has several parts."""
        allocator = self.token_to_kv_pool_allocator
        return allocator.full_attn_allocator if self.is_swa_enabled else allocator

    def _reserve(self) -> int:
        pressure = self.manager.pressure
        return 0 if pressure is None else pressure.reserve()

    def total_size(self) -> tuple[int, int]:
        """Token slots of the tree, and of its other components."""
        return sum(self.node_slots(node) for node in self.nodes()), super().total_size()[1]

    def all_values_flatten(self) -> torch.Tensor:
        """Every token slot that the tree holds; for SGLang's leak checker."""
        held = [node.component_data[FULL].value for node in self.nodes() if node not in self.spans]
        held += [span.segment.token_slots for span in self.spans.values() if span.is_owner]
        return torch.cat(held) if held else torch.tensor([], dtype=torch.int64)

    # ---- matching ---------------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match as stock, but not into what others must not match; a request is remembered as a reader.

        What is compressed is compressed from its first token on: who wants to read nothing compressed finds nothing.
        """
        req, key = params.req, params.key
        if req is not None:
            self.manager.matched(req)
            if self.manager.readers.is_exact(req) and self._blocking.begins_compressed(key):
                key = key[:0]
        return super().match_prefix(replace(params, key=self._allowed(key)))

    def touch_prefix(self, key: RadixKey) -> None:
        """Touch as stock, with the same limit: SGLang splits a node where the key ends."""
        super().touch_prefix(self._allowed(key))

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert as stock, unless the key ends inside an unsplittable span: then it is declined.

        So are SGLang's split at the prompt's end, and checkpoints that stop short of what was prefilled.
        """
        if self._blocking.find(params.key) is not None:
            return InsertResult(prefix_len=len(params.key), rotation_tail_declined=True)
        return super().insert(params)

    def _allowed(self, key: RadixKey) -> RadixKey:
        blocking = self._blocking.find(key)
        return key if blocking is None else key[: self.spans[blocking].start]

    # ---- life of a request ------------------------------------------------------------------------------------

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Insert as stock, then tell the manager if the prompt is complete.

        A prompt that ends or diverges inside an unsplittable span takes its place if nobody reads it, else the
        prompt is not cached: its slots stay the request's own.
        """
        if self.disable:
            super().checkpoint(req, up_to=up_to, **kwargs)
            return
        key = RadixKey(req.full_untruncated_fill_ids[:up_to], req.extra_key, cache_salt=req.cache_salt)
        is_private = self.manager.readers.is_exact(req) and self._blocking.begins_compressed(key)
        if is_private or _keeps_own_chunks(req, up_to):
            self._keep_out(req)
            return
        blocking = self._blocking.find(key)
        if blocking is not None and not self._blocking.drop_subtree(blocking):
            self.manager.listener.refused(REFUSED_NOT_CACHED, up_to)
            self._keep_out(req)
            return
        super().checkpoint(req, up_to=up_to, **kwargs)
        if self.manager.is_complete(req):
            with self.guard.at(Place.PROMPT):
                self.manager.prompt_complete(req, self.tree_core.node_by_id(req.last_node), self._wish_of(req))
                return
            self.manager.forget_observed(req)

    def _keep_out(self, req: Req) -> None:
        """A request's tokens are not cached: if it has finished, its recurrent state goes as well."""
        if req.finished():
            for component in self.components.values():
                component.cleanup_after_caching_req(req, is_finished=True)

    def release_swa_prefix_lock(self, req: Req) -> None:
        """A request's window has moved past its prefix, unless that has grown with what the request generated."""
        window = self.swa_retain_window
        if window is not None and req.seqlen - 1 - window >= req.kv.cache_protected_len:
            super().release_swa_prefix_lock(req)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """A request let go of its path."""
        super().on_release(req, checkpointed=checkpointed)
        self._blocking.drop_unread()
        why = Released.RETRACTED
        if req.finished():
            why = Released.ABORTED if isinstance(req.finished_reason, FINISH_ABORT) else Released.FINISHED
        self.manager.released(req, why)

    def _wish_of(self, req: Req) -> RequestOptions | None:
        """What a request asks of the cache; who wants no answer wants its prompt cached, or its log-probabilities."""
        assert self.compressor is not None
        options = parse_request_options(req.sampling_params.custom_params, self.compressor.config)
        wants_nothing = req.sampling_params.max_new_tokens == 0 and not req.return_logprob
        if wants_nothing and (options is None or not options.warm):
            return RequestOptions(warm=True)
        return options

    # ---- what a forward reads ---------------------------------------------------------------------------------

    def read_paths(self, readers: Sequence[Req]) -> tuple[tuple[SpanRuns, ...], ...]:
        """Resolve what each request of a batch reads now; see :meth:`PrefixManager.reads`."""
        node_by_id = self.tree_core.node_by_id
        return self.manager.reads([node_by_id(req.last_node) for req in readers])

    def window_slots(self, req: Req, start: int, end: int) -> torch.Tensor:
        """Find what a request reads in layers with a sliding window and a pool of their own.

        Returns:
            [end - start], int64, slots of that pool for the tokens ``[start, end)``; 0 where the window is gone.
        """
        path = path_to(self.tree_core.node_by_id(req.last_node))
        slots: torch.Tensor = self.components[SWA].window_slots(self.port.row(req, start, end), path, start)
        return slots

    def observe(self, req: Req, start: int, end: int) -> list[PromptObservation | ReaderChunk]:
        """What a prefill of a request's tokens ``[start, end)`` adds to; see :meth:`PrefixManager.chunk_observed`."""
        node = self.tree_core.node_by_id(req.last_node)
        return self.manager.chunk_observed(req, node, start, end, len(req.full_untruncated_fill_ids))


def _keeps_own_chunks(req: Req, up_to: int) -> bool:
    """Whether a chunk of a prompt is cached only with the whole prompt, because log-probabilities of it are wanted.

    From ``logprob_start_len`` on nothing is taken from the cache. A chunk that were cached would be exchanged for the
    compressed prefix that is there already, and the next chunk's log-probabilities would be those of that.
    """
    return bool(req.return_logprob and 0 <= req.logprob_start_len < up_to < len(req.origin_input_ids))
