"""Two tensor-parallel ranks: each keeps other entries of every prefix, and yet their trees and slots stay equal.

The ranks are threads with a real process group (gloo) between them, each with its own tree, pools and requests.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import distributed

from helpers.harness import WINDOWS, Harness, PseudoRandomPolicy
from helpers.threads_as_ranks import on_two_ranks
from kvevict_kernels.rotary import Rotary
from kvevict_kernels.row_codec import RowStatistics
from sgl_kvevict.config import Bits, KVEvictConfig
from sgl_kvevict.distill.features import CachedRange
from sgl_kvevict.distill.files import Learned
from sgl_kvevict.distill.row_sums import RowSums
from sgl_kvevict.distill.weights import ScoreWeights
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.sglang_adapter.distilling import Distilling
from sgl_kvevict.sglang_adapter.monitoring.server_info import rank_states
from sgl_kvevict.sglang_adapter.ranks import TensorRanks

DOCUMENTS = ([i * 7 % 11 for i in range(70)], [i * 5 % 7 for i in range(70)])
CONFIG = KVEvictConfig(budget=0.4, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6)


class Recorded(TensorRanks):
    """Remembers the numbers that this rank had to offer."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        super().__init__(group)
        self.offered: list[int] = []

    def largest(self, value: int, *same: int) -> int:
        self.offered.append(value)
        return super().largest(value, *same)


def cache_of_rank(
    rank: int, group: distributed.ProcessGroup, bits: Bits = 16, *, waits: bool = False, windows: tuple[int, ...] = ()
) -> Harness:
    config = CONFIG if bits == 16 else CONFIG.model_copy(update={"budget": 0.2})
    policy = PseudoRandomPolicy(rank=rank)
    harness = Harness(
        num_slots=200, num_rows=6, config=config, policy=policy, group=group, bits=bits, waits=waits, windows=windows
    )
    harness.tree.ranks = Recorded(group)
    return harness


def traffic(harness: Harness, seed: int, steps: int) -> list[Any]:
    """Random operations; returns what the cache looked like after each. The harness checks contents all the time."""
    rng = random.Random(seed)
    looks = []
    for _ in range(steps):
        action = rng.choice(["submit"] * 6 + ["decode"] * 3 + ["finish"] * 4 + ["retract", "drop", "drop"])
        decoding = [req for req in harness.live if req.output_ids]
        if action == "submit":
            prompt = rng.choice(DOCUMENTS)[: rng.choice([9, 20, 35, 50, 70])] + [rng.randrange(11) for _ in range(5)]
            harness.run(prompt, chunk=rng.choice([None, None, 13]))
        elif action == "drop":
            harness.evict(rng.choice([5, 20, 60]))
        elif decoding and action in ("decode", "finish", "retract"):
            getattr(harness, action)(rng.choice(decoding))
        tree = harness.tree
        shape = [(len(node.key), tree.node_slots(node), tree.port.num_locks(node)) for node in tree.nodes()]
        looks.append((action, shape, harness.allocator.free_pages.tolist()))
    return looks


@pytest.mark.parametrize(
    ("policy", "seed", "bits"),
    [
        ({}, 1, 16),
        ({}, 2, 16),
        ({"windows": WINDOWS}, 1, 16),
        ({"waits": True}, 2, 16),
        ({}, 1, "auto"),
        ({}, 2, 4),
    ],
    ids=["at-once", "at-once-2", "unsplittable", "when-short", "mixed-bits", "4-bits"],
)
def test_trees_and_slots_stay_equal(policy, seed, bits):
    """With rows of few bits at half the budget: more would keep every entry on both ranks."""

    def run(rank, group):
        harness = cache_of_rank(rank, group, bits, **policy)
        looks = traffic(harness, seed, steps=900 if bits == 16 else 200)  # each of whose rows is decoded
        return looks, harness.tree.ranks.offered, harness.tree.prefixes.totals, rank_states(harness.tree)

    (looks, offered, totals, states), (others_looks, others_offered, others_totals, others_states) = on_two_ranks(run)
    for look, others in zip(looks, others_looks, strict=True):
        assert look == others
    assert states == others_states and states[0] == states[1]
    assert totals.compressions == others_totals.compressions > 5
    assert (totals.kept_entries, totals.repacks) == (others_totals.kept_entries, others_totals.repacks)
    if bits != 16:
        assert totals.splits and totals.repacks and totals.resizes
    elif "windows" not in policy:
        assert totals.splits > 4 and totals.repacks > 2
        assert offered != others_offered  # without agreement, the ranks would have gone apart


def test_a_repack_takes_what_the_rank_with_most_entries_needs():
    def run(rank, group):
        harness = cache_of_rank(rank, group)
        document = DOCUMENTS[0]
        harness.finish(harness.run([*document, 1, 2, 3]))
        harness.finish(harness.run([*document[:30], 9, 9, 9]))  # splits the document at 30
        while len(harness.tree.spans) > 1:
            harness.evict(1)  # in the end the document's lower part, which only the first prompt found
        (segment,) = {span.segment for span in harness.tree.spans.values() if span.start == 0}
        return segment.num_slots, segment.num_entries, harness.tree.ranks.offered

    results = on_two_ranks(run)
    num_runs = 4
    slots = {num_slots for num_slots, _, _ in results}
    assert len(slots) == 1
    assert max(-(-entries // num_runs) for _, entries, _ in results) in slots
    assert results[0][1] != results[1][1]


def test_numbers_go_round():
    def run(rank, group):
        ranks = TensorRanks(group)
        return ranks.size, ranks.is_first, ranks.largest(5 - rank, 7, -1), ranks.gather([rank, 8])

    assert on_two_ranks(run) == [(2, True, 5, [[0, 8], [1, 8]]), (2, False, 5, [[0, 8], [1, 8]])]


def test_one_rank_asks_nobody():
    ranks = TensorRanks()
    assert (ranks.size, ranks.is_first, ranks.largest(3, 4), ranks.gather([1, 2])) == (1, True, 3, [[1, 2]])


def test_ranks_whose_trees_differ_stop():
    def run(rank, group):
        with pytest.raises(InvariantError, match=rf"this rank has \[6, {rank}\], all have \[6, 0\] to \[6, 1\]"):
            TensorRanks(group).largest(3, 6, rank)
        return True

    assert all(on_two_ranks(run))


def test_statistics_are_kept_of_all_heads_and_each_rank_reads_its_own():
    saved = []

    def run(rank, group):
        distilling = object.__new__(Distilling)
        distilling._ranks, distilling._geometry = TensorRanks(group), KVGeometry(2, 2, 2, 8, 50)
        distilling._num_heads, distilling._known, distilling._needs_scores = 4, Learned(), False
        distilling._device = torch.device("cpu")
        distilling._config, distilling._identity = KVEvictConfig(score_weights=None), None
        read = distilling._statistics = RowStatistics.neutral((2, 2, 8))
        k, v = (torch.randn(2, 50, 2, 8, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(2))
        sums = RowSums(distilling._geometry, Rotary(torch.empty(60, 0), is_neox=True))
        sums.add(CachedRange(k, v, torch.arange(50), 4, 54))
        distilling.finish(None, sums, lambda: None)
        saved.append(distilling._known.statistics)
        mine = sums.solve()
        return mine.k_mean, read.k_mean, mine.v_scale, read.v_scale, distilling.digest

    results = on_two_ranks(run)
    for k_mean, read_mean, v_scale, read_deviation, _ in results:
        torch.testing.assert_close(read_mean, k_mean)
        torch.testing.assert_close(read_deviation, v_scale)
    assert all(statistics.k_mean.shape == (2, 4, 8) for statistics in saved)
    assert torch.equal(saved[0].k_mean, torch.cat([results[0][1], results[1][1]], dim=1))
    assert results[0][-1] == results[1][-1] != ""  # of all heads, so servers of other sizes can compare it


@pytest.mark.parametrize(
    ("found", "is_used"), [((1, 1), True), ((1, None), False), ((1, 2), False), ((None, None), None)]
)
def test_learned_scores_are_used_if_all_ranks_found_the_same(found, is_used, caplog):
    """Ranks on other hosts look into other folders."""

    def run(rank, group):
        distilling = object.__new__(Distilling)
        distilling._ranks = TensorRanks(group)
        known = Learned()
        if found[rank] is not None:
            known = Learned(ScoreWeights(torch.full((2, 2, 5), float(found[rank])), torch.zeros(2, 2, 7), 8))
        return distilling._agreed(known).scores is not None

    assert on_two_ranks(run) == [bool(is_used)] * 2
    assert ("found different score weights" in caplog.text) == (is_used is False)


def test_ranks_with_clocks_of_their_own_drop_the_same_leaves(monkeypatch):
    """The clocks of different machines begin anywhere, and readings of one moment differ."""

    def run(rank: int, group: distributed.ProcessGroup) -> list[list[int]]:
        harness, rng = Harness(num_slots=200, config=CONFIG, group=group), random.Random(rank)
        ranks, start, found, turn = harness.tree.ranks, [50_000, 0][rank], [], 0
        now = lambda: ranks.largest(start + turn * 100 + rng.randrange(100))  # noqa: E731
        harness.tree.prefixes.recency._read_now = now
        for turn in range(40):
            options = {"retain": 1.0} if turn % 3 == 0 else None
            harness.finish(harness.run([*DOCUMENTS[0][turn : turn + 30], turn], options=options))
            found.append(sorted(node.key.token_ids[0] for node in harness.tree.nodes()))
        return found

    first, second = on_two_ranks(run)
    assert first == second
