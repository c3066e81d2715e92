"""Two tensor-parallel ranks with a store, or memory on the host: each reads its own part, and all load it or none."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from helpers.harness import Harness, PseudoRandomPolicy
from helpers.harness_store import IDENTITY, Server
from helpers.stored import drained, keys_in
from helpers.threads_as_ranks import on_two_ranks
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state, rank_states

DOCUMENTS = [[*(i * 7 % 11 for i in range(10)), *((i * step) % 11 for i in range(1, 61))] for step in (3, 5, 7)]


CONFIG = KVEvictConfig(budget=0.3, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6, store="s", store_complete=True)
COMPLETE = {"config": CONFIG, "host_blocks": 400}


def server_of(rank, group, folder, **kind) -> Server:
    identity = dataclasses.replace(IDENTITY, rank=rank, num_ranks=2)
    return Server(folder, identity, policy=PseudoRandomPolicy(rank=rank), group=group, **kind)


def fill(folder, **kind):
    def run(rank, group):
        server = server_of(rank, group, folder, num_slots=300, **kind)
        for document in DOCUMENTS:
            server.serve(document)
        return sorted(keys_in(server.segments))

    ours, theirs = on_two_ranks(run)
    assert len(ours) == len(theirs) == len(DOCUMENTS) and not set(ours) & set(theirs)


def ask_all(folder, before=lambda server, rank: None, num_slots=300, share=0.0, **kind):
    """Ask about each document, on two ranks that have an empty tree; what each rank found and loaded."""

    def run(rank, group):
        server = server_of(rank, group, folder, num_slots=num_slots, **kind)
        before(server, rank)
        found = [server.serve([*document[:66], 9, 9, i], share=share) for i, document in enumerate(DOCUMENTS * 2)]
        states = rank_states(server.harness.tree)
        assert cache_state(server.harness.tree)["leaked_slots"] == 0
        return SimpleNamespace(found=found, totals=server.prefixes.totals, states=states)

    ours, theirs = on_two_ranks(run)
    assert ours.found == theirs.found and ours.states == theirs.states and ours.states[0] == ours.states[1]
    return ours


def test_ranks_load_their_own_parts_of_what_all_have(tmp_path):
    fill(tmp_path)
    asked = ask_all(tmp_path)
    assert min(asked.found) >= 66 and asked.totals.loaded_segments == 3


def test_ranks_load_what_was_evicted_and_grow_alike(tmp_path):
    """Each rank has evicted other entries, and as many slots as the one that needs most."""
    fill(tmp_path, **COMPLETE)
    asked = ask_all(tmp_path, share=1.0, **COMPLETE)
    assert min(asked.found) >= 66 and asked.totals.loaded_segments == asked.totals.growths == 3


def test_a_file_of_one_rank_that_lacks_what_was_evicted_is_loaded_by_none(tmp_path):
    fill(tmp_path, **COMPLETE)

    def lose(server, rank):
        for key in keys_in(server.segments) if rank == 1 else ():
            record = server.segments.get(key)
            server.segments.delete(key)
            without = dataclasses.replace(record, evicted=None)
            server.segments.put(without, server.segments.identity.namespace(None, None))

    asked = ask_all(tmp_path, lose, share=1.0, **COMPLETE)
    assert asked.found[0] == 0 and asked.totals.loaded_segments == 0


def test_ranks_load_again_what_was_pushed_out(tmp_path):
    fill(tmp_path)
    asked = ask_all(tmp_path, num_slots=25)
    assert min(asked.found) >= 66 and asked.totals.loaded_segments >= 4


def lacks(server, rank):
    for key in keys_in(server.segments) if rank == 1 else ():
        server.segments.delete(key)


def waits_too_long(server, rank):
    if rank == 1:
        server.reader.is_late = lambda fetch: not fetch.is_done
        server.reader._workers.submit = lambda work: True  # it never comes to it


def has_a_store_in_trouble(server, rank):
    if rank == 0:
        server.reader.start = lambda wanted: None


@pytest.mark.parametrize("before", [lacks, waits_too_long, has_a_store_in_trouble])
def test_what_one_rank_does_not_get_no_rank_loads(tmp_path, before):
    fill(tmp_path)
    asked = ask_all(tmp_path, before)
    assert asked.found[0] == 0 and asked.totals.loaded_segments == 0
    assert before is not waits_too_long or asked.totals.late_loads >= 1


def test_ranks_that_fetched_other_prefixes_of_one_length_load_neither(tmp_path):
    """Each lacks its part of another document; both documents begin alike."""
    shared = DOCUMENTS[0][:65]
    texts = [[*shared, *[step] * 5] for step in (3, 5)]

    def write(rank, group, text):
        server = server_of(rank, group, tmp_path)
        server.harness.finish(server.harness.run(text))
        assert drained(server.writer)

    for text in texts:
        on_two_ranks(lambda rank, group, text=text: write(rank, group, text))

    def run(rank, group):
        server = server_of(rank, group, tmp_path)
        (lost,) = [key for key in keys_in(server.segments) if int(server.segments.get(key).tokens[-1]) == (3, 5)[rank]]
        server.segments.delete(lost)
        found = [server.serve([*start, 9]) for start in ([*shared, *[9] * 20], *(text[:66] for text in texts))]
        return found, server.prefixes.totals.loaded_segments, rank_states(server.harness.tree)

    ours, theirs = on_two_ranks(run)
    assert ours == theirs and ours[0][0] == 0 and ours[1] == 0 and ours[2][0] == ours[2][1]


@pytest.mark.parametrize("host_blocks", [8, 45, 400])
def test_ranks_drop_and_load_the_same(host_blocks):
    """Documents share a beginning: parts of segments are copied, and ranks differ in the number of entries.

    Some requests ask for all entries, or for a share of them: segments grow on both ranks.
    """
    documents = [[*DOCUMENTS[0][:10], *((i * step) % 11 for i in range(1, 51))] for step in range(2, 9)]

    def run(rank, group):
        policy = PseudoRandomPolicy(rank=rank)
        harness = Harness(num_slots=90, policy=policy, group=group, waits=True, host_blocks=host_blocks)
        found = []
        for number, document in enumerate(documents * 3):
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
    assert ours[2] > 0 and min(ours[0][len(documents) :]) >= 10
