"""SGLang's unified radix tree with compressed nodes: same keys and matching, fewer token slots."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.evict_policy import LRUStrategy
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot
from sglang.srt.mem_cache.unified_cache.components import get_and_increase_time_counter
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.cache.adoption import Prompt
from sgl_kvevict.cache.cache import PrefixCache
from sgl_kvevict.cache.nodes import NamespaceKey, namespace_of, path_to, tokens_of
from sgl_kvevict.cache.readers import ReaderRecord
from sgl_kvevict.cache.saving import StoreAccess
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.request import RequestOptions, parse_request_options
from sgl_kvevict.segments.prompt_observation import Recorder
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.sglang_adapter.blocking import BlockingNodes, subtree
from sgl_kvevict.sglang_adapter.distilling import Distilling
from sgl_kvevict.sglang_adapter.kv_pools import state_slots
from sgl_kvevict.sglang_adapter.ranks import TensorRanks
from sgl_kvevict.sglang_adapter.span_component import FULL, SpanComponent
from sgl_kvevict.sglang_adapter.window_component import SWA, SpanAwareSWA
from sgl_kvevict.store.host import HostSegments

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.events import LoRANameTable
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

logger = logging.getLogger(__name__)

ADAPTER_ID_CHARS = 32
"""Characters of the id of a LoRA adapter: a UUID in hexadecimal digits."""


class UnifiedTreePort:
    """Implements :class:`sgl_kvevict.cache.ports.TreePort`, which describes the methods.

    Attributes:
        held: last node of the path that :meth:`holding` holds; None: it holds none.
    """

    def __init__(self, cache: KVEvictTree, adapters: LoRANameTable) -> None:
        self.held: UnifiedTreeNode | None = None
        self._cache = cache
        self._adapters = adapters

    def adapter_of(self, namespace: NamespaceKey) -> str | None:
        """Id of the LoRA adapter with which a namespace's prefixes were computed; None: the model alone.

        Of adapters that SGLang has loaded, also those that it has unloaded since. A request without an adapter whose
        client's key ends with such an id is refused (``request_check.py``), so that no namespace has both.
        """
        extra_key = namespace[0]
        # SGLang appends the id without a separator, so only its length tells where it begins.
        return None if extra_key is None or self._adapters.resolve(extra_key) is None else extra_key[-ADAPTER_ID_CHARS:]

    @property
    def lookahead(self) -> int:
        return int(self._cache.tree_core.is_eagle)

    def _key(self, tokens: Sequence[int], namespace: NamespaceKey) -> RadixKey:
        extra_key, cache_salt = namespace
        return RadixKey(array("q", tokens), extra_key, bool(self.lookahead), cache_salt=cache_salt)

    def num_locks(self, node: UnifiedTreeNode) -> int:
        """Number of locks on a node, but for that of :meth:`holding`."""
        # Our own lock keeps the path in the tree; it reads nothing, so it must not keep segments from shrinking.
        is_held = self.held is not None and node in path_to(self.held)
        return int(node.component_data[FULL].lock_ref) - is_held

    def locked_by(self, reader: Req) -> UnifiedTreeNode | None:
        return None if reader.lock is None else self._cache.tree_core.node_by_id(reader.lock.node)

    def cut(self, node: UnifiedTreeNode, end: int) -> UnifiedTreeNode:
        """Split a node at ``end`` and return the upper half; SGLang splits where a look-up ends."""
        tokens = tokens_of(path_to(node))[: end + self.lookahead]
        self._cache.touch_prefix(self._key(tokens, namespace_of(node)))
        return node.parent

    def token_slots(self, nodes: Sequence[UnifiedTreeNode]) -> torch.Tensor:
        return torch.cat([node.component_data[FULL].value for node in nodes])

    def hold_span(self, node: UnifiedTreeNode) -> None:
        """Replace a node's slots by zeros (the padding slot), of the same length."""
        # First: the window's slots are found through the full-attention ones, which are replaced below.
        if self._cache.is_swa_enabled:
            self._cache.components[SWA].keep_window(node)
        data = node.component_data[FULL]
        data.value = torch.zeros_like(data.value)

    def charge(self, node: UnifiedTreeNode, num_slots: int) -> None:
        self._cache.tree_core.adjust_component_size(node.id, FULL, num_slots)

    def free(self, token_slots: torch.Tensor) -> None:
        """Release full-attention token slots only, also if the pool's allocator couples them with window slots."""
        self._cache.components[FULL].apply_component_action(FreeComponentDeviceSlot([token_slots], FULL))

    def alloc(self, num_slots: int) -> torch.Tensor | None:
        """[num_slots], int64, new token slots; None: not all can be had, and nothing shrinks or is dropped for them."""
        allocator = self._cache.slot_allocator
        missing = num_slots - allocator.available_size()
        if missing > 0:
            # Nothing is dropped for what cannot be had in full.
            if missing > self._cache.evictable_size():
                return None
            self._cache.evict(EvictParams(num_tokens=missing))
        slots: torch.Tensor | None = allocator.alloc(num_slots)
        return None if slots is None else slots.long()

    @contextmanager
    def holding(self, path: Sequence[UnifiedTreeNode]) -> Iterator[None]:
        """Lock a path meanwhile; no reader needs its slots, so it may shrink (:meth:`num_locks`)."""
        if not path:
            yield
            return
        self.held, lock = path[-1], self._cache.lock(path[-1].id)
        try:
            yield
        finally:
            self.held = None
            self._cache.unlock(lock)

    @property
    def num_available(self) -> int:
        return int(self._cache.slot_allocator.available_size()) + self._cache.evictable_size()

    def find(self, tokens: Sequence[int], namespace: NamespaceKey) -> list[UnifiedTreeNode]:
        """Nodes of the longest matching path; SGLang splits a node where the match ends."""
        key = self._key(tokens, namespace)
        match = self._cache.match_prefix(MatchPrefixParams(key=key))
        return path_to(self._cache.tree_core.node_by_id(match.last_device_node))

    def add(self, tokens: Sequence[int], namespace: NamespaceKey) -> UnifiedTreeNode | None:
        """Insert a path with padding slots; ``prev_prefix_len``: SGLang frees none."""
        key = self._key(tokens, namespace)
        fillers = torch.zeros(len(key), dtype=torch.int64, device=self._cache.device)
        result = self._cache.insert(InsertParams(key=key, value=fillers, prev_prefix_len=len(key)))
        return None if result.rotation_tail_declined else self._cache.tree_core.node_by_id(result.last_device_node)

    def slots_of(self, reader: Req, start: int, end: int) -> torch.Tensor:
        """[end - start], int64, slots of the tokens ``[start, end)`` in a request's row."""
        rows: torch.Tensor = self._cache.req_to_token_pool.req_to_token
        return rows[reader.kv.req_pool_idx, start:end].long()

    def clear_slots(self, reader: Req, end: int) -> None:
        """Zero the row up to ``end``: these tokens are now read from spans. A request just admitted has no row yet."""
        if not reader.kv.holds_kv:
            return
        self._cache.req_to_token_pool.write((reader.kv.req_pool_idx, slice(0, end)), 0)

    def largest(self, value: int, *same: int) -> int:
        return self._cache.ranks.largest(value, *same)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._cache.ranks.gather(numbers)


class KVEvictTree(UnifiedRadixCache):
    """Unified tree whose nodes may hold spans. It reports events to the objects of ``prefixes``, which decide.

    With policy ``none`` it works as stock. ``host`` is memory for what is dropped, maybe none; without ``access`` there
    is no store, without ``distilling`` no scores are learned. ``guard`` catches errors that concern one request.
    """

    def __init__(
        self,
        params: CacheInitParams,
        compressor: Compressor,
        host: HostSegments,
        access: StoreAccess | None = None,
        distilling: Distilling | None = None,
    ) -> None:
        self.packer = compressor.packer
        self.compressor = compressor
        self.answer_block = compressor.answer_block
        self.distilling = distilling
        self.ranks = TensorRanks(params.attn_tp_cache_group)
        self.port = UnifiedTreePort(self, params.kv_event_lora_names)
        self.guard = Guard(self.ranks.size)
        states = state_slots(params, self.packer.k_arena)
        self.prefixes = PrefixCache(
            self.port, compressor, self.guard, get_and_increase_time_counter, host, access, states
        )
        self.spans = self.prefixes.spans
        self._blocking = BlockingNodes(self, self.prefixes.table, splittable=compressor.splittable)
        # Read by `reset`, which SGLang's constructor calls before the strategy is known.
        self._weighs_recency = False
        # SGLang's constructor builds the components and calls reset, so this comes after our attributes.
        ours = {FULL: SpanComponent, SWA: SpanAwareSWA}
        params.component_registry_override = {**(params.component_registry_override or {}), **ours}
        super().__init__(params)
        self._weighs_recency = isinstance(self.tree_core.eviction_strategy, LRUStrategy)
        self._order_leaves()
        self.prefixes.totals.clears = 0  # SGLang's constructor has reset the empty tree

    def release_host_resources(self) -> None:
        """SGLang shuts down, with no request left: segments that wait for the store are written."""
        super().release_host_resources()
        self.prefixes.close_store()

    def reset(self) -> None:
        """Forget everything; SGLang clears allocator and rows itself."""
        # Before SGLang's own reset: our records are of nodes that it is about to forget.
        self.prefixes.cleared()
        super().reset()
        # SGLang's reset makes a new set of leaves.
        self._order_leaves()

    def _order_leaves(self) -> None:
        """Use our eviction order if SGLang's default (lru) is set; other policies are followed."""
        if self._weighs_recency:
            self.components[FULL].order_by(self.prefixes.recency)

    def forget_compressed(self) -> None:
        """The weights changed: no compressed prefix or observation is used for new requests.

        A request that reads a compressed prefix goes on reading it, is not cached, and the prefix goes with it.
        Learned scores stay in use: to learn anew would take seconds to minutes, in which nobody is served.
        """
        learned = self.compressor.learned
        if learned is not None and not learned.is_stale:
            learned.is_stale = True
            logger.warning(
                "kvevict: the weights are not those that were loaded: scores learned for those stay in use until a "
                "restart (/server_info: learned_scores.is_stale)"
            )
        self.prefixes.keep_only_spans()
        if self.prefixes.switch_store_off():
            logger.warning("kvevict: the weights are not those that were loaded: the store is off until a restart")
        self._blocking.retire_compressed()

    def drop_unread_parts(self, req: Req) -> bool:
        """Drop what lies below a prompt's last found node, of the same segment, unread; False if there is nothing."""
        node = self.tree_core.node_by_id(req.last_node)
        span = self.spans.get(node)
        if span is None:
            return False
        parts = [child for child in node.children.values() if self.spans.has_part(child, span.segment)]
        return any(self._blocking.drop_subtree(child) for child in parts)  # at most one has a part

    # ---- nodes and sizes --------------------------------------------------------------------------------------

    def nodes(self) -> list[UnifiedTreeNode]:
        """All nodes below the root, level by level."""
        return subtree(self.root_node)[1:]

    def node_slots(self, node: UnifiedTreeNode) -> int:
        """Token slots that a node has in the accounting."""
        return int(self.components[FULL].reclaimable_value_len(node))

    def evictable_size(self) -> int:
        """Token slots that can be released at any time: those of nodes without readers, and reclaimable ones."""
        return int(super().evictable_size()) + self.prefixes.pressure.reclaimable()

    def protected_size(self) -> int:
        """Token slots of nodes with readers, without reclaimable ones."""
        return int(super().protected_size()) - self.prefixes.pressure.reclaimable()

    def held_slots(self) -> int:
        """Token slots that the tree holds, evictable or protected."""
        return int(super().evictable_size()) + int(super().protected_size())

    # SGLang's names of both for pools with several parts.
    full_evictable_size, full_protected_size = evictable_size, protected_size

    @property
    def slot_allocator(self) -> Any:
        """Allocator of the token slots that spans use: the full-attention one if the pool has several parts."""
        allocator = self.token_to_kv_pool_allocator
        return allocator.full_attn_allocator if self.is_swa_enabled else allocator

    def total_size(self) -> tuple[int, int]:
        """Token slots of the tree, and of its other components."""
        return sum(self.node_slots(node) for node in self.nodes()), super().total_size()[1]

    def all_values_flatten(self) -> torch.Tensor:
        """Every token slot that the tree holds; for SGLang's leak checker."""
        held = [node.component_data[FULL].value for node in self.nodes() if node not in self.spans]
        # Once a segment: its spans share its slots.
        held += [segment.packed.token_slots for segment in self.prefixes.table.packed]
        return torch.cat(held) if held else torch.tensor([], dtype=torch.int64)

    # ---- matching ---------------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match as stock up to the first blocking node, and record the request as a reader.

        A compressed path is compressed from its first token, so an exact request matches none of it.
        """
        req, key = params.req, self._pairs(params.key)
        record = None
        if req is not None:
            record = self.prefixes.prefills.matched(req, is_cached=not req.skip_radix_cache_insert)
            record.computed_again = 0
            # Compressed nodes come first on every path, so the first token decides.
            if record.is_exact and self._blocking.begins_compressed(key):
                record.computed_again = self._blocking.num_shared(self._allowed(key))
                key = key[:0]
        key = self._allowed(key)
        result = super().match_prefix(params if key is params.key else replace(params, key=key))
        if record is not None:
            _report_sources(req, record, result.device_prefix_len)
        return result

    def touch_prefix(self, key: RadixKey) -> None:
        """Touch as stock, up to the first blocking node: SGLang splits a node where the key ends."""
        super().touch_prefix(self._allowed(self._pairs(key)))

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert as stock; declined if the key would cut an unsplittable span.

        This also covers SGLang's split at the prompt's end and checkpoints shorter than the prefill.
        """
        if self._blocking.find(params.key) is not None:
            return InsertResult(prefix_len=len(params.key), rotation_tail_declined=True)
        return super().insert(params)

    def prompt_of(self, req: Req, tokens: Sequence[int]) -> Prompt:
        """What the cache may have of a request's tokens; the last one is always computed."""
        return Prompt(tokens, len(tokens) - 1 - self.port.lookahead, namespace_of_request(req))

    def _pairs(self, key: RadixKey) -> RadixKey:
        """A key as the tree's are: its tokens, or pairs of them."""
        return key.maybe_to_bigram_view(self.tree_core.is_eagle)[0]

    def _allowed(self, key: RadixKey) -> RadixKey:
        blocking = self._blocking.find(key)
        return key if blocking is None else key[: self.spans[blocking].start]

    # ---- life of a request ------------------------------------------------------------------------------------

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Insert as stock, then report it if the prompt is complete.

        A prompt that would cut an unsplittable span replaces it if it has no readers; else the prompt is not cached and
        keeps its slots.
        """
        if self.disable:
            super().checkpoint(req, up_to=up_to, **kwargs)
            return
        record, is_eagle = self.prefixes.readers[req], self.tree_core.is_eagle
        key = RadixKey(req.full_untruncated_fill_ids[:up_to], req.extra_key, is_eagle, cache_salt=req.cache_salt)
        node = self.tree_core.node_by_id(req.last_node)
        num_samples = _num_samples(req, record)
        if req.finished() or up_to >= len(req.origin_input_ids):
            self.prefixes.note_read(record, path_to(node), len(req.origin_input_ids))  # before its path changes
            self._count(req, record)
        # SGLang would free what an exact request has computed as a duplicate, and have it read the compressed nodes.
        is_private = record.is_exact and self._blocking.begins_compressed(key)
        if is_private or self._blocking.is_retired(node) or _keeps_own_chunks(req, up_to):
            self._keep_out(req)
            return
        blocking = self._blocking.find(key)
        if blocking is not None and not self._blocking.drop_subtree(blocking):  # it has readers
            self.prefixes.totals.refused_not_cached += 1
            self._keep_out(req)
            return
        super().checkpoint(req, up_to=up_to, **kwargs)
        node, options = self.tree_core.node_by_id(req.last_node), self._options_of(req)
        if record.observation is not None and record.observation.is_complete:  # the whole prompt was prefilled
            self._report_compressed(record, node)
            # The prompt is answered by now; an error costs its compression.
            with self.guard.at(Place.PROMPT) as attempt:
                self.prefixes.prefills.complete(req, node, options, num_samples)
            if attempt.failed:
                record.observation = None
        elif req.finished():
            self._answered(req, record, node, options)
        else:
            with self.guard.at(Place.PROMPT):
                self.prefixes.prefills.chunk_complete(req, node)
        # From the end of the prefill on, and anew from that of the answer, whether or not the prompt was compressed.
        if up_to >= len(req.origin_input_ids) and options.retain is not None:
            self.prefixes.recency.retain(path_to(node), len(req.origin_input_ids), options.retain)

    def insert_answer(self, req: Req) -> None:
        """Between two steps: insert what a running request has generated, if that is a block, and compress it.

        Only tokens of steps whose result is there: nothing of them is cut by a stop any more, or rejected, and the step
        in flight writes none of them.
        """
        block, kv = self.answer_block, req.kv
        # Once a running request and turn: most end here.
        if block is None or (end := self._answer_end(req)) - kv.cache_protected_len < block:
            return
        record = self.prefixes.readers[req]
        is_out = req.finished() or not kv.holds_kv or req.skip_radix_cache_insert or record.is_exact
        if is_out or self._blocking.is_retired(self.tree_core.node_by_id(req.last_node)):
            return
        req.refresh_fill_ids()
        super().checkpoint(req, up_to=end)
        self._answered(req, record, self.tree_core.node_by_id(req.last_node), self._options_of(req))

    def release_swa_prefix_lock(self, req: Req) -> None:
        """As stock, which counts steps since the prompt, once no window reaches into blocks of the answer any more."""
        if req.kv.kv_committed_len - req.kv.cache_protected_len >= self.swa_retain_window:
            super().release_swa_prefix_lock(req)

    def saved_of_answer(self, req: Req, num_new: int) -> int:
        """Token slots of a request's next ``num_new`` tokens that are released while it goes on.

        What stays are their share at the budget, and what is not a block yet.
        """
        config, block = self.compressor.config, self.answer_block
        # With drafts a finished request may have more tokens than it asked for.
        if block is None or num_new < 0 or req.skip_radix_cache_insert or self.prefixes.readers[req].is_exact:
            return 0
        num_held = config.num_slots(num_new, len(req.origin_input_ids)) + block + config.tail_tokens
        return max(num_new - num_held, 0)

    def _answer_end(self, req: Req) -> int:
        """Logical position after the tokens of a request that may be compressed: all known ones but the last."""
        num_known = min(req.kv.kv_committed_len, len(req.origin_input_ids) + len(req.output_ids))
        return int(num_known) - self.compressor.config.tail_tokens

    def _answered(self, req: Req, record: ReaderRecord, node: UnifiedTreeNode, options: RequestOptions) -> None:
        """Compress what is in the tree of an answer, if that is more than its last tokens."""
        start, end = len(req.origin_input_ids), self._answer_end(req)
        if self.answer_block is None or end <= start or record.is_exact:
            return
        with self.guard.at(Place.PROMPT):
            self.prefixes.prefills.answered(node, start, end, options, is_complete=req.finished())

    def _report_compressed(self, record: ReaderRecord, node: UnifiedTreeNode) -> None:
        """Note how much of a prompt was compressed while it was prefilled."""
        if record.chunk_share is None or record.observation is None:
            return
        num_tokens = self.spans.compressed_len(path_to(node)) - record.observation.first_query
        if num_tokens > 0:
            record.has_compressed(num_tokens)
            self.prefixes.totals.prefilled_compressed += 1

    def _count(self, req: Req, record: ReaderRecord) -> None:
        """Count the prompt of a request, once."""
        was_counted, record.is_counted = record.is_counted, True
        if not (was_counted or _is_sample(req)):  # a sample's was counted before it
            totals = self.prefixes.totals
            totals.prompts += 1
            totals.prompt_tokens += len(req.origin_input_ids)
            totals.found_tokens += req.cached_tokens

    def _keep_out(self, req: Req) -> None:
        """Do not cache a request's tokens; if it has finished, release its recurrent state too."""
        if req.finished():
            for component in self.components.values():
                component.cleanup_after_caching_req(req, is_finished=True)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """Release a request's path as stock, then report it."""
        # Taken before SGLang forgets the request's path.
        path = path_to(self.tree_core.node_by_id(req.last_node))
        if not checkpointed:
            self.prefixes.note_read(self.prefixes.readers[req], path, len(req.origin_input_ids))
        super().on_release(req, checkpointed=checkpointed)
        # The last reader of a prefix of old weights takes it along.
        if path and self._blocking.is_retired(path[0]):
            self._blocking.drop_unread(path[0])
        # After SGLang has unlocked the path: ranges that waited for this reader can be packed now.
        self.prefixes.released(req)
        if isinstance(req.finished_reason, FINISH_ABORT):
            self.prefixes.aborted(path)

    def _options_of(self, req: Req) -> RequestOptions:
        """The request's cache options."""
        return parse_request_options(req.sampling_params.custom_params) or RequestOptions()

    # ---- what a forward reads ---------------------------------------------------------------------------------

    def read_paths(self, readers: Sequence[Req]) -> tuple[tuple[SpanRuns, ...], ...]:
        """Span runs that each request of a batch reads now; see :meth:`PrefixCache.reads`."""
        return self.prefixes.reads([self.tree_core.node_by_id(req.last_node) for req in readers])

    def draft_paths(self, readers: Sequence[Req]) -> tuple[tuple[SpanRuns, ...], ...]:
        """Rows that the draft model reads of each request's compressed prefix, root first."""
        paths = (path_to(self.tree_core.node_by_id(req.last_node)) for req in readers)
        return tuple(tuple(self.spans[node].draft_runs() for node in path if node in self.spans) for path in paths)

    def window_slots(self, req: Req, start: int, end: int) -> torch.Tensor:
        """[end - start], int64, window-pool slots of the tokens ``[start, end)``; 0 if the window is gone."""
        path = path_to(self.tree_core.node_by_id(req.last_node))
        slots: torch.Tensor = self.components[SWA].window_slots(self.port.slots_of(req, start, end), path, start)
        return slots

    def observe(self, req: Req, start: int, end: int) -> Sequence[Recorder]:
        """Observations that a prefill of the tokens ``[start, end)`` feeds; :meth:`Prefills.observe`."""
        node = self.tree_core.node_by_id(req.last_node)
        return self.prefixes.prefills.observe(req, node, start, end, len(req.full_untruncated_fill_ids))


def namespace_of_request(req: Req) -> NamespaceKey:
    """The namespace of a request's prefixes; SGLang has appended the adapter's id to the client's ``extra_key``."""
    return req.extra_key, req.cache_salt or None


def _is_sample(req: Req) -> bool:
    """Whether a request is one of ``n``: SGLang sends one of no token before them, only to cache their prompt."""
    return bool(req.sampling_params.n > 1 and req.sampling_params.max_new_tokens != 0)


def _num_samples(req: Req, record: ReaderRecord) -> int:
    """How many samples follow a request; -1: it is one, and has not begun before; see :meth:`Prefills.complete`."""
    if record.is_counted or req.sampling_params.n == 1:
        return 0
    return -1 if _is_sample(req) else int(req.sampling_params.n)


def _keeps_own_chunks(req: Req, up_to: int) -> bool:
    """Whether a chunk of a prompt stays out of the cache until the prompt is complete, for its log-probabilities.

    From ``logprob_start_len`` on nothing is matched. A cached chunk would be replaced by an existing compressed prefix,
    and the next chunk's log-probabilities would be computed from that.
    """
    return bool(req.return_logprob and 0 <= req.logprob_start_len < up_to < len(req.origin_input_ids))


def _report_sources(req: Req, record: ReaderRecord, num_tokens: int) -> None:
    """Set what SGLang reports as ``cached_tokens_details`` of a request that was loaded from the host or the store.

    Of the tokens found at the first admission, as in SGLang, which does not report again after a retraction.
    """
    is_loaded = record.host_start is not None or record.store_start is not None
    if is_loaded and not req.retracted_stain and req.already_computed == 0:
        found = record.sources(num_tokens)
        req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage = found
        req._cache_breakdown_computed = True
