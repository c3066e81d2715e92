"""A scheduler around one tree: SGLang's requests, pools and life cycle, without a model. One slot is one unit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_kvevict.cache.nodes import path_to
from sgl_kvevict.sglang_adapter.host_memory import before_matching
from sgl_kvevict.sglang_adapter.tree import KVEvictTree
from trace_bench.conversations import Turn

MAX_RUNNING = 256
"""Requests that run at once at most."""


@dataclass(frozen=True)
class Kept:
    """What is left of the units of a path, counted in units.

    Attributes:
        num_bytes: bytes, in those of uncompressed units.
        entries: entries that were not evicted.
        bits: the same, times the bits of a number in their rows.
    """

    num_bytes: float = 0.0
    entries: float = 0.0
    bits: float = 0.0

    @staticmethod
    def whole(number: int) -> Kept:
        """All of so many units, as the model computed them."""
        return Kept(number, number, 16.0 * number)

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.num_bytes + other.num_bytes, self.entries + other.entries, self.bits + other.bits)


@dataclass
class Running:
    """A request.

    Attributes:
        found: units of its prompt in the pool, those loaded for it included.
        host: units found only on the host.
        loaded: the bytes that were loaded for it, in those of uncompressed units.
        kept: of the units found.
    """

    turn: Turn
    req: Req
    found: int = 0
    host: int = 0
    loaded: float = 0.0
    kept: Kept = field(default_factory=Kept)


class Server(ABC):
    """What a replay asks of a system."""

    @abstractmethod
    def submit(self, turn: Turn) -> Running:
        """A request arrives; it waits until :meth:`start` admits it."""

    @abstractmethod
    def start(self, running: Running) -> bool:
        """Match a prompt and give it slots; False: they are short, so it waits."""

    @abstractmethod
    def prefilled(self, running: Running) -> float:
        """A prompt was computed. Returns what a decode step of the request reads, in uncompressed units."""

    @abstractmethod
    def finish(self, running: Running) -> None:
        """An answer is complete."""


class TreeServer(Server):
    """One tree with its pools: SGLang's, or ours.

    Attributes:
        tree: the prefix tree under test.
        rows: SGLang's table of requests' slots.
        allocator: of the pool's slots.
        host: a modelled second tier, see :class:`HostTier`.
    """

    def __init__(self, tree: Any, rows: Any, allocator: Any, host: HostTier | None = None) -> None:
        self.tree = tree
        self.rows = rows
        self.allocator = allocator
        self.host = host
        self._promised = 0
        self._number = 0

    def submit(self, turn: Turn) -> Running:
        """Make SGLang's request."""
        self._number += 1
        sampling = SamplingParams(max_new_tokens=len(turn.answer) + 1, temperature=0)
        return Running(turn, Req(f"r{self._number}", "", array("q", turn.prompt), sampling))

    def start(self, running: Running) -> bool:
        """Match and lock the prompt; admitted if free and evictable slots suffice for it and all answers under way."""
        req, turn = running.req, running.turn
        before_matching(req, self.tree)
        req.init_next_round_input(self.tree)
        req.lock = self.tree.lock(req.last_node)
        missing, reserve = len(turn.prompt) - req.prefix_len, len(turn.answer) + 1
        room = self.allocator.available_size() + self.tree.evictable_size()
        if missing + reserve + self._promised > room:
            self.tree.unlock(req.lock)
            req.lock = None
            return False
        running.found, running.kept = req.prefix_len, self._kept(req)
        if self.host is not None:
            running.host = self.host.find(turn.prompt, req.prefix_len)
            running.loaded = running.host * self.host.bytes_per_unit
            running.kept += Kept.whole(running.host)
        elif isinstance(self.tree, KVEvictTree):
            record = self.tree.prefixes.readers[req]
            running.found, running.host, _ = record.sources(req.prefix_len)
            running.loaded = running.kept.num_bytes - self._kept(req, running.found).num_bytes
        slots = self._alloc(missing)
        prefix = self.tree.prefix_device_indices(req) if req.prefix_len else None
        self.rows.alloc([req])
        if prefix is not None:
            self.rows.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), prefix.to(torch.int32))
        self._write(req, req.prefix_len, slots)
        self._promised += reserve
        return True

    def prefilled(self, running: Running) -> float:
        """Insert the prompt into the tree, as SGLang does after its last chunk."""
        req = running.req
        req.extend_end = len(running.turn.prompt)
        if isinstance(self.tree, KVEvictTree):
            self.tree.observe(req, req.prefix_len, req.extend_end)
        req.output_ids.append(running.turn.answer[0] if running.turn.answer else 0)
        checkpoint_kv_cache(req, self.tree)
        return self._kept(req).num_bytes

    def finish(self, running: Running) -> None:
        """Give the answer its slots, all at once, and release the request."""
        req, turn = running.req, running.turn
        self._promised -= len(turn.answer) + 1
        if turn.answer:
            self._write(req, len(turn.prompt), self._alloc(len(turn.answer)))
            req.output_ids.extend(array("q", [*turn.answer[1:], 0]))
        req.refresh_fill_ids()
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        req.finished_len = len(req.output_ids)
        release_kv_cache(req, self.tree, checkpoint=True)
        if self.host is not None:
            self.host.put([*turn.prompt, *turn.answer])

    def _write(self, req: Req, start: int, slots: torch.Tensor) -> None:
        end = start + slots.numel()
        self.rows.write((req.kv.req_pool_idx, slice(start, end)), slots.to(torch.int32))
        req.kv.kv_committed_len = req.kv.kv_allocated_len = end

    def _alloc(self, number: int) -> torch.Tensor:
        short = number - self.allocator.available_size()
        if short > 0:
            self.tree.evict(EvictParams(num_tokens=short))
        slots: torch.Tensor | None = self.allocator.alloc(number)
        if slots is None:
            raise RuntimeError(f"admission promised {number} token slots, {self.allocator.available_size()} are free")
        return slots

    def _kept(self, req: Req, end: int | None = None) -> Kept:
        """What the pool holds of a request's path, or of its first ``end`` units."""
        if not isinstance(self.tree, KVEvictTree):
            return Kept.whole(req.kv.cache_protected_len if req.kv.holds_kv else req.prefix_len)
        path, spans = path_to(self.tree.tree_core.node_by_id(req.last_node)), self.tree.spans
        total, position = Kept(), 0
        for node in path:
            number = len(node.key) if end is None else min(len(node.key), end - position)
            position, span = position + number, spans.get(node)
            if span is None:
                total += Kept.whole(number)
                continue
            segment = span.segment
            share = number / segment.num_tokens
            share_of_entries = share / self.tree.packer.geometry.num_runs
            bits = sum(bits * count for bits, count in segment.entries_by_bits.items())
            entries = segment.num_live_entries
            total += Kept(segment.num_slots * share, entries * share_of_entries, bits * share_of_entries)
        return total


class HostTier:
    """A model of HiCache's host pool, which needs a GPU to run: an LRU of units, written through at every answer.

    As in SGLang, it holds copies of what the pool has, too, and a unit leaves after those below it.

    Args:
        capacity: units.
        bytes_per_unit: bytes that a load of one copies, in those of an uncompressed one.
    """

    def __init__(self, capacity: int, bytes_per_unit: float = 1.0) -> None:
        self.bytes_per_unit = bytes_per_unit
        self._capacity = capacity
        self._units: OrderedDict[int, None] = OrderedDict()

    def find(self, prompt: list[int], start: int) -> int:
        """Number of units from ``start`` on, without a gap; the last one of a prompt is always computed."""
        end = start
        while end < len(prompt) - 1 and prompt[end] in self._units:
            end += 1
        return end - start

    def put(self, units: list[int]) -> None:
        """Write a path, or note that it was used, its end first."""
        for unit in reversed(units):
            self._units[unit] = None
            self._units.move_to_end(unit)
        while len(self._units) > self._capacity:
            self._units.popitem(last=False)
