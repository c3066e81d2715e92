from __future__ import annotations

import threading
from pathlib import Path

import pytest

from helpers.stored import drained, identity, record, tokens
from sgl_kvevict.errors import StoreError
from sgl_kvevict.store.reader import PAUSE_S, ReadAhead
from sgl_kvevict.store.segments import QUARANTINE_S, SegmentStore, open_backend, segment_name
from sgl_kvevict.store.tier import Lookup
from sgl_kvevict.store.workers import Workers
from sgl_kvevict.store.writer import LOG_EVERY_S, WriteBehind

OWN = identity()
SPACE = OWN.namespace(None, None)


@pytest.fixture
def store(tmp_path):
    return SegmentStore(open_backend(str(tmp_path)), OWN)


def fetched(reader, prompt, compressed=0, cached=0, space=SPACE):
    fetch = reader.start(Lookup(prompt, space, compressed, cached))
    assert fetch is not None and drained(reader._workers) and fetch.is_done
    return fetch


def test_segments_that_come_too_fast_are_dropped_and_counted(store, monkeypatch):
    gate = threading.Event()
    put = store.put
    monkeypatch.setattr(store, "put", lambda *args: gate.wait(300) and put(*args))
    writer = WriteBehind(store, max_bytes=250)
    records = [record(OWN, SPACE, tokens(40, seed)) for seed in range(4)]
    taken = [writer.has_room(100) and writer.write(lambda r=r: r, SPACE, 100) for r in records]
    assert taken == [True, True, False, False] and writer.num_dropped == 2
    gate.set()
    assert drained(writer)
    assert [num_bytes is not None and num_bytes > 0 for num_bytes in writer.done] == [True, True]
    assert writer.has_room(251)  # larger than what may wait: it is alone
    assert writer.write(lambda: records[0], SPACE, 100) and drained(writer)
    assert writer.done[-1] == 0  # it was there


def test_the_first_failed_write_of_each_kind_is_logged_then_one_a_minute(store, monkeypatch, caplog):
    now, errors = [0.0], [OSError(28, "No space left"), OSError(30, "Read-only"), OSError(28, "No space left")]

    def fail(path, data):
        raise errors[0]

    monkeypatch.setattr(Path, "write_bytes", fail)
    writer = WriteBehind(store, clock=lambda: now[0])
    lines = []
    for elapsed in (0.0, LOG_EVERY_S):
        now[0] = elapsed
        for error in errors:
            errors[0] = error
            writer.write(lambda: record(OWN, SPACE, tokens(40)), SPACE, 100)
            assert drained(writer, 10) and writer.done[-1] is None
        lines.append(len(caplog.messages))
    assert lines == [2, 4] and "No space left" in caplog.text and "Read-only" in caplog.text


def test_an_unexpected_error_is_logged_and_the_thread_goes_on(caplog):
    workers = Workers("test", 1, 2)
    workers.submit(lambda: 1 / 0)
    assert drained(workers)
    done = threading.Event()
    workers.submit(done.set)
    assert done.wait(300) and "division by zero" in caplog.text


def test_segments_of_a_path_are_fetched_one_after_the_other(store):
    document = tokens(200)
    turn = [*document, *tokens(150, seed=1)]
    store.put(record(OWN, SPACE, document), SPACE)
    store.put(record(OWN, SPACE, turn, start=200), SPACE)
    reader = ReadAhead(store, 1.0)
    assert [(each.start, each.end) for each in fetched(reader, [*turn, 1]).records] == [(0, 200), (200, 350)]
    assert [each.end for each in fetched(reader, [*turn[:330], 1, 2]).records] == [200, 350]
    assert [each.start for each in fetched(reader, [*turn, 1], 200, 200).records] == [200]
    assert fetched(reader, [*turn, 1], 250, 260).records[0].start == 200  # the tree is compressed up to its middle
    assert fetched(reader, [*turn, 1], 100, 200).records == []  # what wins so much begins behind that
    assert reader.start(Lookup([*turn, 1], SPACE, 350, 350)) is None


def test_the_longest_agreement_wins_and_a_small_one_is_not_fetched(store):
    document = tokens(200)
    branches = [[*document, *tokens(100, seed)] for seed in (1, 2)]
    for branch in (document, *branches):
        store.put(record(OWN, SPACE, branch), SPACE)
    reader = ReadAhead(store, 1.0)
    assert fetched(reader, [*branches[1], 1]).records[0].key == SPACE.segment(branches[1], 0)
    assert fetched(reader, [*document, *tokens(50, seed=3)]).records[0].end in (200, 300)
    assert fetched(reader, [*document[:80], *tokens(50, seed=3)]).records == []  # less than half of any
    assert fetched(reader, [*document[:180], *tokens(50, seed=3)], 0, 170).records == []  # wins less than a prefix


def test_an_unsplittable_segment_is_fetched_only_as_a_whole(store):
    document = tokens(200)
    store.put(record(OWN, SPACE, document, splittable=False), SPACE)
    reader = ReadAhead(store, 1.0)
    assert fetched(reader, [*document[:190], *tokens(50, seed=3)]).records == []
    assert fetched(reader, [*document[:199], 1001, 3]).records == []  # only its last tokens, after all whole blocks
    assert len(fetched(reader, [*document, 3]).records) == 1


def test_a_corrupt_segment_is_reported_removed_and_the_next_best_taken(store):
    document = tokens(200)
    longer = [*document, *tokens(60, seed=1)]
    for path in (document, longer):
        store.put(record(OWN, SPACE, path), SPACE)
    key = SPACE.segment(longer, 0)
    store.backend.put(segment_name(OWN.digest, key), b"half")
    fetch = fetched(ReadAhead(store, 1.0), [*longer, 1])
    assert [each.end for each in fetch.records] == [200]
    assert len(fetch.errors) == 1 and key in fetch.errors[0] and store.get(key) is None


def test_a_store_in_trouble_gets_a_pause(store, monkeypatch):
    now = [0.0]
    reader = ReadAhead(store, 0.1, lambda: now[0])

    def fail(*_args):
        raise StoreError("unreachable")

    with monkeypatch.context() as patch:
        patch.setattr(store.backend, "get", fail)
        patch.setattr(store.backend, "get_many", fail)
        assert fetched(reader, tokens(100)).errors == ["unreachable"]
        assert reader.start(Lookup(tokens(100), SPACE, 0, 0)) is None and reader.num_skipped == 1
    now[0] = PAUSE_S
    assert fetched(reader, tokens(100)).errors == []


@pytest.mark.parametrize("which", ["segments", "prefixes"])
def test_one_item_that_cannot_be_read_is_quarantined_and_the_others_are_found(store, tmp_path, monkeypatch, which):
    """A folder in the place of a file: one error, no pause, and the item is not touched again for a while."""
    now = [0.0]
    store = SegmentStore(store.backend, OWN, lambda: now[0])
    bad, good = tokens(100), tokens(100, seed=1)
    for path in (bad, good):
        store.put(record(OWN, SPACE, path), SPACE)
    name = SPACE.segment(bad, 0) if which == "segments" else SPACE.chain(bad, OWN.block_tokens)[-1]
    path = next(tmp_path.rglob(name))
    path.unlink()
    path.mkdir()
    touched = []
    get = store.backend.get
    monkeypatch.setattr(store.backend, "get", lambda each, *_: touched.append(each.split("/")[-1]) or get(each))
    reader = ReadAhead(store, 0.1, lambda: now[0])
    (error,) = fetched(reader, [*bad, 1]).errors
    assert "not a regular file" in error and name in error and touched.count(name) == 1
    assert fetched(reader, [*bad, 1]).errors == [] and touched.count(name) == 1
    assert len(fetched(reader, [*good, 1]).records) == 1 and reader.num_skipped == 0
    now[0] = QUARANTINE_S
    path.rmdir()
    store.put(record(OWN, SPACE, bad), SPACE)
    assert len(fetched(reader, [*bad, 1]).records) == 1


def test_work_that_waits_when_the_server_stops_is_counted_and_cancelled():
    workers, gate, done = Workers("test", 1, 3), threading.Event(), []
    for i in range(3):
        assert workers.submit(lambda i=i: gate.wait(10) and done.append(i))
    assert workers.close(0.01) == 3
    gate.set()
    assert drained(workers, 10) and done == [0]


def test_a_late_fetch_is_abandoned_and_the_store_gets_a_pause(store, monkeypatch):
    store.put(record(OWN, SPACE, tokens(200)), SPACE)
    gate, now = threading.Event(), [0.0]
    get = store.backend.get
    monkeypatch.setattr(store.backend, "get", lambda name, limit: (gate.wait(300), get(name, limit))[1])
    reader = ReadAhead(store, 0.1, lambda: now[0])
    fetch = reader.start(Lookup([*tokens(200), 1], SPACE, 0, 0))
    assert fetch is not None and not reader.is_late(fetch)
    now[0] = 0.1
    assert reader.is_late(fetch) and fetch.is_abandoned
    assert reader.start(Lookup([*tokens(200), 1], SPACE, 0, 0)) is None
    gate.set()
    assert drained(reader._workers) and fetch.is_done and fetch.records[1:] == []


def test_a_late_fetch_causes_no_pause_if_others_were_served(store, monkeypatch):
    store.put(record(OWN, SPACE, tokens(200)), SPACE)
    now = [0.0]
    reader = ReadAhead(store, 0.1, lambda: now[0])
    with monkeypatch.context() as patch:
        patch.setattr(reader._workers, "submit", lambda work: True)  # others are before it all the time
        fetch = reader.start(Lookup([*tokens(200), 1], SPACE, 0, 0))
    now[0] = 0.05
    fetched(reader, [*tokens(200), 1])
    now[0] = 0.1
    assert reader.is_late(fetch)
    assert fetched(reader, [*tokens(200), 2]).records != []  # no pause


def test_requests_for_the_same_segment_share_one_read(store, monkeypatch):
    store.put(record(OWN, SPACE, tokens(200)), SPACE)
    reads, all_asked = [], threading.Event()
    get = store.get

    def held(key):
        reads.append(key)
        assert all_asked.wait(300)
        return get(key)

    monkeypatch.setattr(store, "get", held)
    reader = ReadAhead(store, 5.0)
    fetches = [reader.start(Lookup([*tokens(200), i], SPACE, 0, 0)) for i in range(6)]
    all_asked.set()
    assert drained(reader._workers) and len(reads) == 1
    assert len({id(fetch.records[0]) for fetch in fetches}) == 1
