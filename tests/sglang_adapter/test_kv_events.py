"""SGLang's own KV-event stream stays right for compressed nodes: a mirror built from it equals the tree."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from helpers.harness import WINDOWS, Harness
from helpers.kv_mirror import Mirror

DOCUMENTS = [[i * step % 11 for i in range(60)] for step in (3, 5, 7)]


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


def check(harness: Harness, mirror: Mirror) -> None:
    mirror.apply(harness.tree.take_events())
    assert Counter(mirror.blocks.values()) == tree_blocks(harness)


@pytest.mark.parametrize("windows", [(), WINDOWS])
@pytest.mark.parametrize("dynamo_format", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_random_traffic(seed, dynamo_format, windows):
    rng = random.Random(seed)
    harness, mirror = Harness(num_slots=150, windows=windows), Mirror()
    harness.tree.tree_core.kv_events.enabled = True
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
        check(harness, mirror)
    totals = harness.tree.prefixes.totals
    assert seen["spans"] > 20 and totals.compressions and (totals.splits or windows) and totals.dropped_spans
