"""A prefix tree without SGLang: nodes, locks, rows and a pool of slots, for tests of the life of a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from helpers.learned import LearnedCompressor
from helpers.statistics import random_statistics
from helpers.stored import identity
from sgl_kvevict.cache import PrefixCache
from sgl_kvevict.cache.nodes import NamespaceKey, path_to
from sgl_kvevict.cache.ports import PassPort, PassState, TreePort
from sgl_kvevict.cache.readers import Released
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.guard import Guard
from sgl_kvevict.request import RequestOptions
from sgl_kvevict.segments import Compressor, SegmentPacker
from sgl_kvevict.segments.streams import ChoiceStream
from sgl_kvevict.store.host import HostSegments

CONFIG = KVEvictConfig(
    budget=0.5, tail_tokens=2, sink_tokens=0, min_prefix_tokens=4, scoring_pass_tokens=16, score_after_matches=1
)


@dataclass
class FakeKey:
    """Tokens of a node."""

    token_ids: list[int]
    extra_key: str | None = None
    cache_salt: str | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(eq=False)
class FakeNode:
    """A node that knows its neighbours, its slots and how often it is locked."""

    id: int
    key: FakeKey
    parent: FakeNode | None = None
    children: dict[int, FakeNode] = field(default_factory=dict)
    slots: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    charged: int = 0
    locks: int = 0
    last_access_time: float = 0.0


def fake_path(node: FakeNode) -> list[FakeNode]:
    """Nodes from below the root to ``node``."""
    return cast("list[FakeNode]", path_to(node))


@dataclass(eq=False)
class FakeReader:
    """A request: what it locks, and which slots its tokens have."""

    node: FakeNode | None
    row: Tensor


class FakeTree:
    """Implements the tree's port, and what a test does to a tree.

    Attributes:
        prefixes: the objects that it calls.
        free_slots: slots that came back.
        cuts: positions at which nodes were split.
    """

    def __init__(
        self,
        policy: Any,
        config: KVEvictConfig = CONFIG,
        num_slots: int = 400,
        *,
        scores_any_range: bool = False,
        stream: ChoiceStream | None = None,
        has_few_bits: bool = False,
    ) -> None:
        self.geometry = KVGeometry(2, 2, 2, 32 if has_few_bits else 2, num_slots)
        self.now = 0.0
        arena = torch.zeros(self.geometry.arena_shape, dtype=torch.bfloat16 if has_few_bits else torch.float32)
        statistics = random_statistics(self.geometry) if has_few_bits else None
        store = SegmentPacker(self.geometry, arena, arena.clone(), statistics=statistics)
        self.guard = Guard()
        compressor = (LearnedCompressor if scores_any_range else Compressor)(config, policy, store, stream=stream)
        host = HostSegments(0, 1, arena.device, identity())
        self.prefixes = PrefixCache(cast("TreePort", self), compressor, self.guard, lambda: self.now, host)
        self.root = FakeNode(0, FakeKey([]))
        self.free_slots: list[int] = []
        self.cuts: list[int] = []
        self._next_slot = 1
        self._count = 0

    def adapter_of(self, namespace: NamespaceKey) -> str | None:
        return None

    # ---- what a test does -----------------------------------------------------------------------------------------

    def add(self, num_tokens: int, parent: FakeNode | None = None, extra_key: str | None = None) -> FakeNode:
        """Insert a node below another one."""
        self._count += 1
        above = parent or self.root
        node = FakeNode(self._count, FakeKey(list(range(num_tokens)), extra_key), above)
        node.slots = torch.arange(self._next_slot, self._next_slot + num_tokens)
        node.charged = num_tokens
        self._next_slot += num_tokens
        above.children[node.id] = node
        return node

    def reader(self, node: FakeNode) -> FakeReader:
        """A request that matches a path, and locks it."""
        row = torch.cat([each.slots for each in fake_path(node)] + [torch.zeros(64, dtype=torch.int64)])
        reader = FakeReader(None, row)
        self.prefixes.prefills.matched(reader)
        self.lock(reader, node)
        return reader

    def lock(self, reader: FakeReader, node: FakeNode) -> None:
        """Move a reader's lock."""
        self.unlock(reader)
        reader.node = node
        for each in fake_path(node):
            each.locks += 1

    def unlock(self, reader: FakeReader) -> None:
        """Take a reader's lock away."""
        if reader.node is not None:
            for each in fake_path(reader.node):
                each.locks -= 1
        reader.node = None

    def prompt(self, node: FakeNode, found: FakeNode | None = None, **options: Any) -> FakeReader:
        """A request whose prompt was prefilled to the end of ``node``; the cache held it up to ``found``."""
        reader = self.reader(node)
        start = 0 if found is None else sum(len(each.key) for each in fake_path(found))
        end = sum(len(each.key) for each in fake_path(node))
        self.observe(reader, found or self.root, start, end)
        self.complete(reader, node, **options)
        return reader

    def observe(self, reader: FakeReader, node: FakeNode, start: int, end: int, prompt_len: int | None = None) -> list:
        """A prefill runs."""
        return self.prefixes.prefills.observe(reader, node, start, end, end if prompt_len is None else prompt_len)

    def complete(self, reader: FakeReader, node: FakeNode, **options: Any) -> None:
        """A prompt is in the tree."""
        self.prefixes.prefills.complete(reader, node, RequestOptions(**options))

    def release(self, reader: FakeReader, why: Released = Released.FINISHED) -> None:
        """A request is released."""
        self.unlock(reader)
        self.prefixes.released(reader, why)

    def drop(self, node: FakeNode) -> int:
        """A leaf leaves the tree; returns the slots that came back."""
        assert node.locks == 0 and not node.children and node.parent is not None
        del node.parent.children[node.id]
        slots = self.prefixes.dropped(node)
        slots = node.slots if slots is None else slots
        self.free(slots)
        return len(slots)

    # ---- the port -------------------------------------------------------------------------------------------------

    def num_locks(self, node: FakeNode) -> int:
        return node.locks

    def locked_by(self, reader: FakeReader) -> FakeNode | None:
        return reader.node

    def cut(self, path: Sequence[FakeNode], end: int) -> FakeNode:
        self.cuts.append(end)
        position = 0
        for node in path:
            if position + len(node.key) > end:
                break
            position += len(node.key)
        else:
            raise AssertionError("nothing to cut")
        assert node.parent is not None
        size = end - position
        self._count += 1
        upper = FakeNode(self._count, FakeKey(node.key.token_ids[:size], node.key.extra_key), node.parent)
        upper.locks, upper.children = node.locks, {node.id: node}
        upper.slots, node.slots = node.slots[:size], node.slots[size:]
        del node.parent.children[node.id]
        node.parent.children[upper.id] = upper
        node.parent, node.key = upper, FakeKey(node.key.token_ids[size:], node.key.extra_key)
        self.prefixes.table.split(upper, node)
        for each in (upper, node):
            span = self.prefixes.spans.get(each)
            each.charged = len(each.key) if span is None else span.charged_slots
        return upper

    def token_slots(self, nodes: Sequence[FakeNode]) -> Tensor:
        return torch.cat([node.slots for node in nodes])

    def hold_span(self, node: FakeNode) -> None:
        node.slots = torch.zeros_like(node.slots)

    def charge(self, node: FakeNode, num_slots: int) -> None:
        node.charged += num_slots

    def free(self, token_slots: Tensor) -> None:
        self.free_slots += token_slots.tolist()

    def slots_of(self, reader: FakeReader, start: int, end: int) -> Tensor:
        return reader.row[start:end]

    def clear_slots(self, reader: FakeReader, end: int) -> None:
        reader.row[:end] = 0

    def gather(self, numbers):
        return [list(numbers)]

    def largest(self, value: int, *same: int) -> int:
        return value


class FakePasses:
    """Implements the scheduler's port.

    Attributes:
        now: seconds; they pass only if a test says so, so a server without users is idle from its start.
        started: passes, as (last node of the prefix, probe).
    """

    tokenizer = None
    room = 1000
    now = 0.0
    has_users = has_waiting = is_paused = False

    def __init__(self, tree: FakeTree) -> None:
        self.tree = tree
        self.started: list[tuple[FakeNode, list[int]]] = []
        self.waiting: list[FakeReader] = []

    def start(self, node: FakeNode, probe: Sequence[int]) -> FakeReader:
        self.started.append((node, list(probe)))
        reader = FakeReader(None, torch.zeros(1000, dtype=torch.int64))
        self.waiting.append(reader)
        return reader

    def record(self, chunk: object) -> None:
        """What a pass sees; nothing here."""

    def state(self, reader: FakeReader) -> PassState:
        if reader.node is not None:
            return PassState.RUNNING
        return PassState.WAITING if reader in self.waiting else PassState.GONE

    def withdraw(self, reader: FakeReader) -> None:
        self.waiting.remove(reader)

    def run(self, why: Released = Released.FINISHED) -> bool:
        """Run the next pass to its end; False if there is none."""
        self.tree.prefixes.between_steps(cast("PassPort", self))
        if not self.waiting:
            return False
        reader, (node, _) = self.waiting.pop(), self.started[-1]
        self.tree.prefixes.prefills.matched(reader)
        self.tree.lock(reader, node)
        length = sum(len(each.key) for each in fake_path(node))
        reader.row[:length] = torch.cat([each.slots for each in fake_path(node)])
        for chunk in self.tree.observe(reader, node, length, length + 10):
            self.record(chunk)
        self.tree.release(reader, why)
        return True
