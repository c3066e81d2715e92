"""Two tensor-parallel ranks with memory on the host: each has its part of the same prefixes."""

from __future__ import annotations

import pytest

from helpers.harness import Harness, PseudoRandomPolicy
from helpers.threads_as_ranks import on_two_ranks
from sgl_kvevict.sglang_adapter.monitoring.server_info import rank_states

DOCUMENTS = [[*(i * 7 % 11 for i in range(10)), *((i * step) % 11 for i in range(1, 51))] for step in range(2, 9)]


@pytest.mark.parametrize("host_blocks", [8, 45, 400])
def test_ranks_drop_and_load_the_same(host_blocks):
    """Documents share a beginning: parts of segments are copied, and ranks differ in the number of entries.

    Some requests ask for all entries, or for a share of them: segments grow on both ranks.
    """

    def run(rank, group):
        policy = PseudoRandomPolicy(rank=rank)
        harness = Harness(num_slots=90, policy=policy, group=group, waits=True, host_blocks=host_blocks)
        found = []
        for number, document in enumerate(DOCUMENTS * 3):
            req = harness.request([*document, 1])
            harness.tree.prefixes.readers[req].least_share = [0.0, 1.0, 0.4][number % 3]
            assert harness.admit(req)
            found.append(req.prefix_len)
            assert harness.prefill(req)
            harness.decode(req)
            harness.finish(req)
            harness.turn()
        copies = [(each, each.record) for each in harness.host._segments.values()]
        held = {(one.start, one.end, len(each.copy.blocks), len(one.parts)) for each, one in copies}
        totals = harness.tree.prefixes.totals
        evicted = [(part.start, part.end, len(part.blocks)) for part in harness.host.evicted]
        grown = totals.growths, totals.grown_slots, evicted
        return found, held, totals.moved_in_segments, rank_states(harness.tree), grown

    ours, theirs = on_two_ranks(run)
    assert ours == theirs and ours[3][0] == ours[3][1]
    assert ours[4][0] > 0
    assert ours[2] > 0 and min(ours[0][len(DOCUMENTS) :]) >= 10
