"""SGLang's own KV-event stream stays right for compressed nodes: a mirror built from it equals the tree."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from helpers.harness import WINDOWS, Harness

DOCUMENTS = [[i * step % 11 for i in range(60)] for step in (3, 5, 7)]


class Mirror:
    """What a cache-aware router knows: every cached block by its hash, with the tokens that lead to it."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}

    def apply(self, events: list) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.blocks[block]
            else:
                assert isinstance(event, BlockStored) and event.block_size == 1
                before = () if event.parent_block_hash is None else self.blocks[event.parent_block_hash]
                for block, token in zip(event.block_hashes, event.token_ids, strict=True):
                    before = (*before, token)
                    assert self.blocks.setdefault(block, before) == before
                    self.blocks[block] = before


def tree_blocks(harness: Harness) -> Counter:
    """Every token of every node, as the tokens that lead to it."""
    blocks: Counter = Counter()
    stack = [(child, ()) for child in harness.tree.root_node.children.values()]
    while stack:
        node, before = stack.pop()
        for token in node.key:
            before = (*before, token)
            blocks[before] += 1
        stack.extend((child, before) for child in node.children.values())
    return blocks


def watched_harness(**fields) -> tuple[Harness, Mirror]:
    harness = Harness(**fields)
    harness.tree.tree_core.kv_events.enabled = True
    return harness, Mirror()


def check(harness: Harness, mirror: Mirror) -> None:
    mirror.apply(harness.tree.take_events())
    assert Counter(mirror.blocks.values()) == tree_blocks(harness)


def test_compression_and_splits_say_nothing_and_drops_say_what_went():
    harness, mirror = watched_harness()
    harness.finish(harness.run(DOCUMENTS[0]))
    check(harness, mirror)
    assert harness.tree.spans and len(mirror.blocks) == 60
    harness.finish(harness.run([*DOCUMENTS[0][:20], 9, 9, 9]))  # splits the span
    check(harness, mirror)
    assert len(harness.tree.spans) == 2
    while harness.evict(1):
        check(harness, mirror)
    assert not mirror.blocks


@pytest.mark.parametrize("windows", [(), WINDOWS])
@pytest.mark.parametrize("dynamo_format", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_random_traffic(seed, dynamo_format, windows):
    rng = random.Random(seed)
    harness, mirror = watched_harness(num_slots=150, windows=windows)
    harness.tree.tree_core.kv_events.dynamo_format = dynamo_format  # only this format tells namespaces apart
    seen: Counter = Counter()
    for _ in range(120):
        action = rng.random()
        if action < 0.6:
            shared = rng.choice([0, 2, 20, 40, 60])
            suffix = [rng.randrange(11) for _ in range(rng.choice([1, 3, 20]))]
            extra_key = rng.choice([None, None, "tenant"]) if dynamo_format else None
            harness.run(rng.choice(DOCUMENTS)[:shared] + suffix, extra_key, rng.choice([None, 13]))
        elif action < 0.75 and harness.live:
            harness.decode(rng.choice(harness.live))
        elif action < 0.9 and harness.live:
            harness.finish(rng.choice(harness.live))
        elif action < 0.97:
            harness.evict(rng.choice([1, 10, 40]))
        elif not harness.live:
            harness.flush()
        seen["spans"] += bool(harness.tree.spans)
        seen["compressions"] = harness.tree.prefixes.totals.compressions
        check(harness, mirror)
    assert seen["spans"] > 20 and seen["compressions"] > 0
