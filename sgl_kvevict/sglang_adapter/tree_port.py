"""SGLang's unified tree, as the life of a prefix sees it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot

from sgl_kvevict.errors import InvariantError
from sgl_kvevict.guard import accounting
from sgl_kvevict.lifecycle.nodes import path_to, tokens_of
from sgl_kvevict.sglang_adapter.ranks import TensorRanks
from sgl_kvevict.sglang_adapter.span_component import FULL
from sgl_kvevict.sglang_adapter.window_component import SWA

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class UnifiedTreePort:
    """Implements :class:`sgl_kvevict.lifecycle.ports.TreePort`.

    Args:
        cache: the tree.
        ranks: the tensor-parallel ranks that hold the same tree.
    """

    def __init__(self, cache: UnifiedRadixCache, ranks: TensorRanks) -> None:
        self.ranks = ranks
        self._cache = cache

    def num_locks(self, node: UnifiedTreeNode) -> int:
        """How many locks a node holds."""
        return int(node.component_data[FULL].lock_ref)

    def locked_by(self, reader: Req) -> UnifiedTreeNode | None:
        """Last node of the path that a request locks."""
        return None if reader.lock is None else self._cache.tree_core.node_by_id(reader.lock.node)

    def cut(self, path: Sequence[UnifiedTreeNode], end: int) -> UnifiedTreeNode:
        """Split a node at ``end`` and return the upper part: SGLang splits where a look-up ends."""
        position = 0
        for node in path:
            position += len(node.key)
            if position > end:
                break
        else:
            raise InvariantError(f"the path has {position} tokens, expected more than {end}")
        tokens = array("q", tokens_of(path)[:end])
        self._cache.touch_prefix(RadixKey(tokens, node.key.extra_key, cache_salt=node.key.cache_salt))
        return node.parent

    def token_slots(self, nodes: Sequence[UnifiedTreeNode]) -> torch.Tensor:
        """[num_tokens], int64, ordinary slots of consecutive uncompressed nodes."""
        return torch.cat([node.component_data[FULL].value for node in nodes])

    def hold_span(self, node: UnifiedTreeNode) -> None:
        """Replace a node's slots by a filler of the same length."""
        if self._cache.is_swa_enabled:
            self._cache.components[SWA].keep_window(node)
        data = node.component_data[FULL]
        data.value = torch.zeros_like(data.value)

    def charge(self, node: UnifiedTreeNode, num_slots: int) -> None:
        """Add to what the accounting says a node carries."""
        self._cache.tree_core.adjust_component_size(node.id, FULL, num_slots)

    def free(self, token_slots: torch.Tensor) -> None:
        """Give token slots back: those of full attention only, whatever else the pool's allocator couples with them."""
        self._cache.components[FULL].apply_component_action(FreeComponentDeviceSlot([token_slots], FULL))

    def alloc(self, num_slots: int) -> torch.Tensor | None:
        """[num_slots], int64, token slots of the pool, for which others give way."""
        allocator = self._cache.slot_allocator
        missing = num_slots - allocator.available_size()
        if missing > 0:
            self._cache.evict(EvictParams(num_tokens=missing))
        slots: torch.Tensor | None = allocator.alloc(num_slots)
        return None if slots is None else slots.long()

    def find(self, tokens: Sequence[int], extra_key: str | None, cache_salt: str | None) -> list[UnifiedTreeNode]:
        """Nodes of the longest path that begins as some tokens do: SGLang splits where a look-up ends."""
        key = RadixKey(array("q", tokens), extra_key, cache_salt=cache_salt)
        match = self._cache.match_prefix(MatchPrefixParams(key=key))
        return path_to(self._cache.tree_core.node_by_id(match.last_device_node))

    def add(
        self, tokens: Sequence[int], extra_key: str | None, cache_salt: str | None, slots: torch.Tensor | None = None
    ) -> UnifiedTreeNode | None:
        """Insert a path whose values are zeros (the padding slot); ``prev_prefix_len``: SGLang frees none of them."""
        key = RadixKey(array("q", tokens), extra_key, cache_salt=cache_salt)
        fillers = torch.zeros(len(tokens), dtype=torch.int64, device=self._cache.device)
        if slots is not None:
            fillers[len(tokens) - slots.numel() :] = slots
        result = self._cache.insert(InsertParams(key=key, value=fillers, prev_prefix_len=len(tokens)))
        return None if result.rotation_tail_declined else self._cache.tree_core.node_by_id(result.last_device_node)

    def num_known(self, reader: Req) -> int:
        """Tokens of a running request; 0 if it ends now, or keeps its tokens to itself."""
        if reader.finished() or reader.skip_radix_cache_insert:
            return 0
        return len(reader.origin_input_ids) + len(reader.output_ids)

    @accounting()
    def keep(self, reader: Req, end: int) -> UnifiedTreeNode | None:
        """Checkpoint what a request generated, as SGLang does with chunks of a prompt."""
        reader.refresh_fill_ids()
        self._cache.checkpoint(reader, up_to=end)
        if reader.kv.cache_protected_len == 0:
            return None
        return self._cache.tree_core.node_by_id(reader.last_node)

    def row(self, reader: Req, start: int, end: int) -> torch.Tensor:
        """[end - start], int64, slots of a part of a request's row."""
        rows: torch.Tensor = self._cache.req_to_token_pool.req_to_token
        return rows[reader.kv.req_pool_idx, start:end].long()

    def clear_row(self, reader: Req, end: int) -> None:
        """The beginning of a request's row is read from spans from now on; one that is just admitted has no row yet."""
        if not reader.kv.holds_kv:
            return
        self._cache.req_to_token_pool.write((reader.kv.req_pool_idx, slice(0, end)), 0)

    def largest(self, value: int, *same: int) -> int:
        """Largest value of all ranks; see :meth:`TensorRanks.largest`."""
        return self.ranks.largest(value, *same)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Numbers of every rank; see :meth:`TensorRanks.gather`."""
        return self.ranks.gather(numbers)
