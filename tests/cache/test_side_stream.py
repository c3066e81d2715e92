"""What a device would be told about a compression, in which order and on which stream: from a tape."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch

from helpers.decisions import OWN_POLICIES
from helpers.documents import document, make_harness
from helpers.stream_tape import StreamTape
from sgl_kvevict.policies import build_policy
from sgl_kvevict.segments import packer
from sgl_kvevict.segments.streams import SideStream

DEVICE = torch.device("cuda:0")


@pytest.fixture
def tape(monkeypatch):
    return StreamTape(monkeypatch)


@pytest.fixture
def harness(tape, monkeypatch):
    """Entries are chosen by the norms of their keys, which the choice reads from the arena."""
    monkeypatch.setattr(packer, "compact_kv", tape.noting("rows move", packer.compact_kv))
    policy = build_policy(OWN_POLICIES["knorm"], {})
    harness = make_harness(options={"policy": policy, "make_stream": lambda: SideStream(DEVICE)})
    harness.tree.port.free = tape.noting("slots are released", harness.tree.port.free)
    return harness


def step(tape):
    """SGLang's next step: it waits for the scheduler's stream, and the scheduler's next writes wait for it."""
    tape.forward.wait_stream(tape.scheduler)
    with tape.on(tape.forward):
        tape.note("step")
    tape.scheduler.wait_stream(tape.forward)


def first_wait(tape):
    """Where the host first waits for the choice: an order is checked before rows move by it."""
    assert not tape.places("scheduler", "wait for event")
    return tape.places("host", "wait for event")[0]


def test_a_step_runs_beside_the_choice_and_only_rows_wait_for_both(tape, harness):
    with tape:
        harness.turn()
        step(tape)
        harness.run(document(0, 20))  # SGLang reads the results of the step before, while this one runs
        harness.turn()
        step(tape)
        harness.turn()
        step(tape)
    (begins,), (chosen,) = tape.places("side", "wait for scheduler"), tape.places("side", "record")
    assert tape.places("side") == list(range(begins, chosen + 1)) and chosen - begins > 10
    first, beside, after = tape.places("forward", "step")
    (moves,) = tape.places("scheduler", "rows move")
    waits = first_wait(tape)
    (released,) = tape.places("scheduler", "slots are released")
    assert first < begins < chosen < beside < waits < moves < released < after
    fence = tape.places("scheduler", "wait for forward")[1]
    assert beside < fence < waits
    assert not any("side" in what or "event" in what for name, what in tape.entries if name == "forward")


def test_the_choice_writes_to_its_own_memory_only(tape, harness):
    known = {x.untyped_storage().data_ptr() for x in (harness.k, harness.v, harness.rows.req_to_token)}
    with tape:
        harness.run(document(0, 20))
    written = {storage for stream, storage in tape.writes if stream == "side"}
    assert written and not written & known


def test_where_slots_are_short_the_host_waits_for_the_choice_before_rows_move(tape, harness):
    with tape:
        harness.run(document(0, 20))
        assert harness.tree.prefixes.pressure.reclaim(None) >= 9
    (chosen,), waits = tape.places("side", "record"), first_wait(tape)
    (moves,) = tape.places("scheduler", "rows move")
    assert chosen < waits < moves


def test_a_range_given_up_is_waited_for_by_no_one(tape, harness):
    harness.tree.prefixes.pressure.reclaim = lambda *_: 0  # it would shrink instead
    with tape:
        harness.finish(harness.run(document(0, 20)))
        for _ in range(2):
            harness.evict(1)
        for _ in range(3):
            harness.turn()
    assert not tape.places("host", "wait for event") and not tape.places("scheduler", "rows move")


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_read_is_kept_until_the_device_has_read_it(tape, fails):
    """Even if the result is of no use, or the work fails: its memory would be given to another."""
    stream, source = SideStream(DEVICE), torch.ones(3)
    known = weakref.ref(source)

    def work(source=source):
        source.sum()
        if fails:
            raise ValueError("no such policy")

    with pytest.raises(ValueError, match="no such policy") if fails else nullcontext():
        stream.launch(work)
    assert tape.places("side", "record")
    del source, work
    stream.launch(lambda: None)
    gc.collect()
    assert known() is not None
    tape.is_done = True
    stream.launch(lambda: None)
    gc.collect()
    assert known() is None
