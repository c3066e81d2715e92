"""What a server hands to the store, what it takes back while requests wait, and what happens when that fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.harness import Harness, publish_server_args
from helpers.harness_store import IDENTITY, adoption
from sgl_kvevict.compression import CacheObservation
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import StoreError
from sgl_kvevict.lifecycle.observer import CacheObserver
from sgl_kvevict.lifecycle.storing import StoredPrefixes
from sgl_kvevict.sglang_adapter.introspection import cache_state
from sgl_kvevict.sglang_adapter.storing import around_admission, in_order
from sgl_kvevict.store import ReadAhead, SegmentStore, WriteBehind, open_backend

DOCUMENT = [i * 7 % 11 for i in range(60)]


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    publish_server_args(tmp_path_factory.mktemp("tiny-llama"))


class Heard(CacheObserver):
    """Remembers what was told of the store."""

    def __init__(self):
        self.stored_segments, self.loads, self.failures = [], [], []

    def stored(self, written):
        self.stored_segments.append(written)

    def loaded(self, key, start, end):
        self.loads.append((start, end))

    def load_failed(self, reason, error):
        self.failures.append(reason)


class Server:
    """A harness with a store; ``now`` is its clock."""

    def __init__(self, folder, **kind):
        self.now = 0.0
        self.harness = Harness(**kind)
        tree = self.harness.tree
        self.segments = SegmentStore(open_backend(str(folder)), IDENTITY)
        self.writer = WriteBehind(self.segments)
        self.reader = ReadAhead(self.segments, 1.0, lambda: self.now)
        self.stored = StoredPrefixes(
            tree.port, tree.spans, tree.store, adoption(self.harness), IDENTITY, self.writer, self.reader, tree.guard, 4
        )
        tree.manager.use_store(self.stored)
        self.heard = self.stored.observer = Heard()

    def serve(self, prompt, *, waits=True, extra_key=None):
        """Queue a request, wait for the store, and run it; return how much it found."""
        req = self.harness.request(prompt, extra_key)
        self.stored.queued(req, prompt[:-1], extra_key, None)
        if waits:
            assert self.reader._workers.drain(10)
        assert self.stored.settle() == set()
        self.harness.check()
        assert self.harness.admit(req)
        found = req.prefix_len
        assert self.harness.prefill(req)
        self.harness.decode(req)
        self.harness.finish(req)
        assert self.writer.drain(10)
        self.stored.between_steps()
        return found


def test_a_prefix_outlives_its_server(tmp_path):
    first = Server(tmp_path)
    assert first.serve(DOCUMENT) == 0
    assert [(done.num_tokens, done.error) for done in first.heard.stored_segments] == [(56, None)]
    second = Server(tmp_path, num_slots=200)
    assert second.serve([*DOCUMENT[:56], 9, 9, 9]) == 56
    assert second.heard.loads == [(0, 56)] and second.heard.stored_segments == []
    assert second.stored.state() | {"loaded": 1, "loaded_tokens": 56, "late": 0} == second.stored.state()
    assert second.serve([*DOCUMENT[:56], 9, 9, 9, 8]) == 59  # of the tree: nothing is fetched twice
    assert len(second.heard.loads) == 1


def test_a_tail_comes_back_for_prompts_that_go_on_with_it(tmp_path):
    Server(tmp_path).serve(DOCUMENT)
    assert Server(tmp_path, num_slots=200).serve([*DOCUMENT, 9, 9]) == 60
    assert Server(tmp_path, num_slots=200).serve([*DOCUMENT[:58], 9, 9, 9]) == 58
    tight = Server(tmp_path, num_slots=30)
    assert tight.serve([*DOCUMENT, 9, 9]) in (56, 60)


def test_requests_that_wait_for_the_same_prefix_bring_it_once(tmp_path):
    Server(tmp_path).serve(DOCUMENT)
    server = Server(tmp_path, num_slots=30)
    twins = [server.harness.request([*DOCUMENT[:56], 9, i]) for i in range(3)]
    for req in twins:
        server.stored.queued(req, [*DOCUMENT[:56], 9], None, None)
    assert server.reader._workers.drain(10) and server.stored.settle() == set()
    server.harness.check()
    assert (server.stored.totals.loaded, server.stored.totals.not_placed) == (1, 2)
    assert cache_state(server.harness.tree)["free_slots"] == 30 - 17
    for req in twins:
        assert server.harness.admit(req) and req.prefix_len == 56
    for req in twins:
        server.harness.abort(req)


def test_namespaces_find_their_own(tmp_path):
    Server(tmp_path).serve(DOCUMENT, extra_key="a")
    second = Server(tmp_path)
    assert second.serve([*DOCUMENT[:56], 9, 9]) == 0 and second.serve([*DOCUMENT[:56], 9, 9], extra_key="b") == 0
    assert second.serve([*DOCUMENT[:56], 8, 9], extra_key="a") == 56


def test_what_shrinks_by_steps_is_stored_at_the_budget_only(tmp_path):
    config = KVEvictConfig(
        budget=0.3, light_budget=0.6, min_budget=0.1, tail_tokens=4, sink_tokens=2, min_prefix_tokens=50
    )
    server = Server(tmp_path, config=config, num_slots=120)
    manager = server.harness.tree.manager
    server.harness.finish(server.harness.run(DOCUMENT[:50]))
    (last,) = [node for node in server.harness.tree.nodes() if len(node.key) >= 50]
    observation = CacheObservation()
    done = {}
    for share in (0.6, 0.3, 0.1):
        if share == 0.6:
            assert manager.ranges.compress_now(last, 50, observation, share) == 20
        else:
            manager.pressure._squeeze_to(last, config.slots_at(share, 50))
        server.harness.check()
        assert server.writer.drain(10)
        server.stored.between_steps()
        done[share] = len(server.heard.stored_segments)
    assert done == {0.6: 0, 0.3: 1, 0.1: 1}
    (stored,) = server.segments.list()
    assert server.segments.get(stored.key).num_entries == 15 * 4


def test_who_waits_too_long_goes_on_without(tmp_path, monkeypatch):
    Server(tmp_path).serve(DOCUMENT)
    server = Server(tmp_path)
    monkeypatch.setattr(server.reader._workers, "submit", lambda work: True)  # it never comes to it
    req = server.harness.request([*DOCUMENT[:56], 9, 9])
    server.stored.queued(req, [*DOCUMENT[:56], 9], None, None)
    assert server.stored.settle() == {req}
    server.now = 1.0
    assert server.stored.settle() == set() and server.heard.failures == ["late"]
    assert server.stored.state()["late"] == 1


def test_a_store_that_fails_is_told_and_the_prompt_computed(tmp_path, monkeypatch):
    Server(tmp_path).serve(DOCUMENT)
    server = Server(tmp_path)

    def fail(*_args):
        raise StoreError("unreachable")

    monkeypatch.setattr(server.segments.backend, "get", fail)
    monkeypatch.setattr(server.segments.backend, "put", fail)
    monkeypatch.setattr(server.segments.backend, "exists", fail)
    assert server.serve(DOCUMENT) == 0
    assert server.heard.failures == ["error"] and server.heard.stored_segments[0].error == "unreachable"
    assert cache_state(server.harness.tree)["leaked_slots"] == 0


def test_an_error_nobody_expects_is_held(tmp_path, monkeypatch):
    server = Server(tmp_path)
    monkeypatch.setattr(server.harness.tree.store, "rows", lambda segment: 1 / 0)
    monkeypatch.setattr(server.reader, "start", lambda wanted: 1 / 0)
    assert server.serve(DOCUMENT) == 0
    errors = {place.value: count for place, count in server.harness.tree.guard.errors.items() if count}
    assert errors == {"store": 2}


def test_new_weights_switch_the_store_off(tmp_path):
    Server(tmp_path).serve(DOCUMENT)
    server = Server(tmp_path)
    waiting = server.harness.request([*DOCUMENT, 9])
    server.stored.queued(waiting, DOCUMENT, None, None)
    server.harness.tree.forget_compressed()
    assert server.stored.settle() == set() and not server.stored.is_on
    assert server.serve([*DOCUMENT[:56], 9, 9]) == 0
    assert server.heard.stored_segments == [] and server.heard.loads == []


def test_random_traffic_with_restarts_keeps_every_slot(tmp_path):
    """Small pools, shared beginnings, loads that push others out: contents and conservation after every step."""
    documents = [[(i * step) % 11 for i in range(60)] for step in (3, 5, 7)]
    for start in range(3):
        server = Server(tmp_path, num_slots=110)
        for i in range(9):
            document = documents[(i + start) % 3]
            server.serve([*document[: 60 - 7 * (i % 3)], *([i] * 6)])
        assert cache_state(server.harness.tree)["leaked_slots"] == 0
        assert server.harness.tree.guard.errors == dict.fromkeys(server.harness.tree.guard.errors, 0)
        assert (server.stored.totals.loaded > 0) == (start > 0)


def test_who_waits_is_passed_over_and_keeps_its_place(tmp_path):
    server = Server(tmp_path)
    a, b, c, d = (server.harness.request([1, 2, i]) for i in range(4))
    server.stored.settle = lambda: {a, c}
    scheduler = SimpleNamespace(tree_cache=server.harness.tree, waiting_queue=[a, b, c], chunked_req=None)
    seen = []

    def admit(scheduler):
        seen.append(list(scheduler.waiting_queue))
        scheduler.waiting_queue = [*scheduler.waiting_queue[1:], d]  # b is admitted, d comes back
        return "plan"

    assert around_admission(admit, scheduler) == "plan"
    assert seen == [[b]] and scheduler.waiting_queue == [a, c, d]

    def fail(scheduler):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError):
        around_admission(fail, scheduler)
    assert scheduler.waiting_queue == [a, c, d]


def test_the_order_of_a_queue_that_was_sorted_is_kept():
    a, b, c, d = "abcd"
    assert in_order([a, b, c, d], {b}, [a, c, d]) == [a, b, c, d]
    assert in_order([a, b, c, d], {a, d}, [c, b]) == [a, c, b, d]
    assert in_order([a, b], {a, b}, []) == [a, b]
