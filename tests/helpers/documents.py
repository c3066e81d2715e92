"""The harness with small numbers, and documents that share nothing: for tests of the life of a prefix."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import Req

from helpers.harness import WINDOWS, Harness
from sgl_kvevict.cache.recency import Priority
from sgl_kvevict.config import KVEvictConfig

CONFIG = KVEvictConfig(budget=0.5, tail_tokens=2, sink_tokens=0, min_prefix_tokens=4)


def make_harness(
    num_slots: int = 400, *, waits: bool = False, splittable: bool = True, options: Any = None, **fields: Any
) -> Harness:
    """A pool of so many token slots; ``options`` are more of the harness, ``fields`` of the configuration."""
    given: dict[str, Any] = {"waits": waits, "config": CONFIG.model_copy(update=fields)}
    given["windows"] = () if splittable else WINDOWS
    return Harness(num_slots=num_slots - 1, **(given | (options or {})))


def document(number: int, num_tokens: int = 20) -> list[int]:
    """Tokens that no document of another number has; number 0 has its positions."""
    return list(range(100 * number, 100 * number + num_tokens))


def admitted(harness: Harness, tokens: list[int], *, is_exact: bool = False) -> Req:
    """A request that has matched a path and locks it."""
    req = harness.request(tokens)
    harness.tree.prefixes.readers[req].is_exact = is_exact
    assert harness.admit(req)
    return req


def reading(harness: Harness, tokens: list[int]) -> Req:
    """A request that reads a prompt exactly, and generates."""
    req = admitted(harness, tokens, is_exact=True)
    assert harness.prefill(req)
    return req


def nodes_of(harness: Harness, number: int) -> list[Any]:
    """Nodes whose tokens are a document's, the first one first."""
    nodes = [node for node in harness.tree.nodes() if node.key.token_ids[0] // 100 == number]
    return sorted(nodes, key=lambda node: node.key.token_ids[0])


def ranges(harness: Harness) -> list[tuple[int, int]]:
    """Where packed spans begin and end."""
    return sorted((span.start, span.end) for span in harness.tree.spans.values())


def reclaim(harness: Harness, leaf: Priority | None = None) -> int:
    """One round of shrinking; the slots that it says came back did."""
    before = harness.allocator.available_size()
    released = harness.tree.prefixes.pressure.reclaim(leaf)
    assert released == harness.allocator.available_size() - before
    harness.check()
    return released
