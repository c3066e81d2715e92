"""The replay of agents' conversations: what traces say of prompts, and what trees find of them."""

from __future__ import annotations

from itertools import islice

import pytest
from trace_bench.clock import Machine
from trace_bench.conversations import MAX_CONTEXT, UNIT, Conversation, Sample, Turn
from trace_bench.replay import Everything, Replay
from trace_bench.server import HostTier
from trace_bench.systems import SYSTEMS

TOOLS = list(range(1, 9))
NUM_TURNS, GROWTH = 6, 40

pytestmark = pytest.mark.usefixtures("server_args")


def made_up(number: int) -> Conversation:
    """An agent that asks a few times, begins anew after its tools, and asks a few times more."""
    turns = []
    for part in range(2):
        text = [*TOOLS, *range(1000 * (2 * number + part + 1), 1000 * (2 * number + part + 1) + GROWTH * NUM_TURNS)]
        for turn in range(NUM_TURNS):
            end = len(TOOLS) + GROWTH * turn + GROWTH // 2
            turns.append(Turn(text[:end], text[end : end + 4], 1.0, 0))
    return Conversation(f"agent {number}", len(TOOLS), (1, 1), turns)


def replay(server, clients=4, requests=48):
    conversations = [made_up(number) for number in range(3 * clients)]
    run = Replay(server, conversations, Machine(), clients=clients, warm_up=0)
    return run.run(requests), run


def test_prompts_of_the_traces_share_what_they_say_they_share():
    conversations = list(islice(Sample(1), 40))
    assert all(0 < len(turn.prompt) <= MAX_CONTEXT // UNIT for each in conversations for turn in each.turns)
    assert [each.name for each in conversations] == [each.name for each in islice(Sample(1), 40)]
    assert [each.name for each in conversations] != [each.name for each in islice(Sample(2), 40)]
    families: dict = {}
    for each in conversations:
        first = each.turns[0].prompt[: each.shared]
        assert families.setdefault(each.family, first)[: len(first)] == first[: len(families[each.family])]
    texts = [set(each.turns[-1].prompt[each.shared :]) for each in conversations]
    assert len(set().union(*texts)) == sum(map(len, texts))
    found = total = 0
    for each in conversations:
        for before, after in zip(each.turns, each.turns[1:], strict=False):
            found += sum(a == b for a, b in zip(before.prompt, after.prompt, strict=False))
            total += len(after.prompt)
    assert 0.9 < found / total < 1


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_with_memory_for_all_every_system_finds_all(system):
    most, run = replay(Everything())
    totals, _ = replay(system.build(20 * run.most_live))
    assert (totals.requests, totals.prompt) == (most.requests, most.prompt)
    assert totals.pool == most.pool and totals.host == 0
    assert totals.prefill_s == pytest.approx(most.prefill_s)
    # A prompt is compressed to a fifth at once.
    least, largest = (0.2, 0.3) if system.name.startswith("ours") else (1, 1)
    assert least <= totals.kept.num_bytes / most.kept.num_bytes <= largest


def test_with_little_memory_systems_find_what_they_can():
    _, run = replay(Everything())
    slots = int(0.4 * run.most_live)
    found = {}
    for system in SYSTEMS:
        totals, _ = replay(system.build(slots))
        found[system.name] = totals.pool + totals.host
        assert totals.requests >= 48  # admitted; 48 of them have finished
        assert 0 <= totals.kept.num_bytes <= totals.kept.entries + 1 <= found[system.name] + 1
        assert totals.seconds > 0 and len(totals.first_token_s) >= 47
    assert found["nothing compressed"] == found["stock, LRU"] < found["stock, HiCache 2x"]
    assert found["stock, HiCache 2x"] <= found["stock, HiCache 2x, codec 20x"]
    assert found["stock, LRU"] < found["ours, 16 bits"] <= found["ours"]


def test_a_host_tier_forgets_ends_before_beginnings():
    tier = HostTier(6)
    tier.put([1, 2, 3, 4])
    tier.put([1, 2, 5, 6])
    assert tier.find([1, 2, 3, 4, 9], 0) == 4
    tier.put([7, 8])
    assert tier.find([1, 2, 3, 4, 9], 0) == 2 and tier.find([1, 2, 5, 6, 9], 1) == 3
    assert tier.find([1, 2, 5, 6], 0) == 3  # the last one is computed
