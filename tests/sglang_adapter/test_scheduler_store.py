"""What a server hands to the store, what it takes back while requests wait, and what happens when that fails."""

from __future__ import annotations

import dataclasses
import json
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from helpers.harness import DOCUMENT, NO_ROTARY, TINY_LLAMA, Harness
from helpers.harness_store import DRAFT, Server, identity_for
from helpers.stored import drained, keys_in
from helpers.verify_machines import VerifyingHarness
from sgl_kvevict.cache.loading import READ_AHEAD
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import StoreError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state
from sgl_kvevict.sglang_adapter.ranks import TensorRanks
from sgl_kvevict.sglang_adapter.scheduler_store import fetch, identity_of, read_with, settings_of, without_waiting


def test_a_prefix_outlives_its_server(tmp_path):
    first = Server(tmp_path)
    assert first.serve(DOCUMENT) == 0
    assert (first.prefixes.totals.stored_segments, first.prefixes.totals.not_stored) == (1, 0)
    assert first.prefixes.totals.stored_bytes > 0
    second = Server(tmp_path, num_slots=200)
    assert second.serve([*DOCUMENT, 9, 9, 9]) == 60
    totals = second.prefixes.totals
    assert second.loaded == (1, 60) and (totals.late_loads, totals.stored_segments, totals.already_stored) == (0, 0, 0)
    assert second.serve([*DOCUMENT, 9, 9, 9, 8]) == 63  # of the tree: nothing is fetched twice
    assert second.loaded == (1, 60)


def test_rows_of_the_draft_model_outlive_its_server(tmp_path):
    """A server with another draft model, or without, finds the prefix without rows; the harness checks all of them."""
    first = Server(tmp_path, draft=DRAFT, make=VerifyingHarness)
    assert first.serve(DOCUMENT) == 0 and first.serve([*DOCUMENT, 9, 9]) == 60
    rows = {}
    for name, draft in {"same": DRAFT, "other": dataclasses.replace(DRAFT, model="cd" * 32)}.items():
        server = Server(tmp_path, draft=draft, make=VerifyingHarness, num_slots=200)
        assert server.serve([*DOCUMENT, 9, 9, 9]) == 60 and server.loaded == (1, 60)
        rows[name] = server.harness.num_draft_rows_read
        assert server.serve([*DOCUMENT[:30], 8, 8]) == 30  # a split
        again = Server(tmp_path, draft=draft, make=VerifyingHarness, num_slots=200)
        assert again.serve([*DOCUMENT, 9, 9]) == 60
        assert cache_state(server.harness.tree)["leaked_slots"] == 0
    assert rows["same"] > 0 == rows["other"]
    without = Server(tmp_path, num_slots=200)
    assert without.serve([*DOCUMENT, 9, 9, 9]) == 60 and without.loaded == (1, 60)


def test_a_draft_model_is_known_by_its_weights_and_configuration(tmp_path, monkeypatch):
    """Not by its path, nor if it has no safetensors files."""
    monkeypatch.setattr("sgl_kvevict.sglang_adapter.scheduler_store.rotary_of", lambda _runner: NO_ROTARY)
    geometry = KVGeometry(1, 3, 3, 2, 9)

    def digest(folder, weight, load_format=None, **settings):
        (tmp_path / folder).mkdir()
        if weight is not None:
            tensor = torch.as_tensor(weight).expand(4000, 64).contiguous()
            save_file({"fc": tensor}, tmp_path / folder / "model.safetensors")
        hf_config = SimpleNamespace(architectures=["LlamaForCausalLMEagle"], to_dict=lambda: settings)
        model = SimpleNamespace(
            model_path=str(tmp_path / folder), revision=None, hf_config=hf_config, dtype="float32", quantization=None
        )
        runner = SimpleNamespace(model_config=model, draft_load_format=load_format)
        identity = identity_of(KVEvictConfig(), runner, TensorRanks(None), geometry, torch.float32)
        return None if identity is None else identity.digest

    first = digest("a", 1.0)
    assert first is not None and first == digest("b", 1.0)
    assert len({first, digest("c", 2.0), digest("d", 1.0, rope_theta=1e6)}) == 3
    one_row = torch.ones(4000, 64)
    assert first is not None and digest("g", one_row) != digest("h", one_row.index_fill(0, torch.tensor([1234]), 1.5))
    assert digest("e", None) is None and digest("f", 1.0, "dummy") is None


def test_servers_that_differ_in_what_no_key_depends_on_share_a_store(tmp_path):
    """``--context-length``, for one; rope scaling by context changes keys."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))

    def settings(**flags):
        args = ServerArgs(model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True, **flags)
        return settings_of(ModelConfig.from_server_args(args).hf_config)

    def override(**values):
        return settings(json_model_override_args=json.dumps(values))

    plain = settings()
    assert plain == settings(context_length=1024) == settings(context_length=2048, dtype="float16")
    assert plain == override(eos_token_id=3) == override(max_position_embeddings=512)
    assert plain != override(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert plain != override(rope_theta=1e6) and plain != override(rms_norm_eps=1e-3)
    whole = {"text_config": {"rms_norm_eps": 1e-6, "context_len": 1}, "_name_or_path": "a"}
    other = {"text_config": {"rms_norm_eps": 1e-6, "_name_or_path": "b"}, "dtype": "float16"}
    assert settings_of(SimpleNamespace(to_dict=lambda: whole)) == settings_of(SimpleNamespace(to_dict=lambda: other))


COMPLETE = KVEvictConfig(
    budget=0.3, min_budget=0.1, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6, store="s", store_complete=True
)


def complete_server(folder, bits=16, **kind):
    """A server whose files hold evicted entries, too; its host has room for them."""
    make = partial(Harness, bits=bits)
    own = identity_for(Harness(bits=bits))
    given = {"config": COMPLETE, "num_slots": 240, "host_blocks": 300} | kind
    return Server(folder, own, make=make, **given)


def share_of(server, prompt):
    """Share of their entries that packed prefixes of a prompt have in the pool."""
    prefixes = server.prefixes
    path = prefixes._tree.find(prompt, (None, None))
    return prefixes.spans.compressed_read(path, len(prompt)).share


@pytest.mark.parametrize(("bits", "budget"), [(16, 0.3), ("auto", 0.15)])
def test_what_was_evicted_outlives_its_server(tmp_path, bits, budget):
    """A request that asks for all entries gets them; others read what the pool had. The harness checks each entry."""
    server = partial(complete_server, tmp_path, bits, config=COMPLETE.model_copy(update={"budget": budget}))
    assert server().serve(DOCUMENT) == 0
    second = server()
    (key,) = keys_in(second.segments)
    assert second.segments.get(key).is_complete
    assert second.serve([*DOCUMENT, 9, 9, 9]) == 60
    assert share_of(second, DOCUMENT) < 0.9 and second.loaded == (1, 60)
    assert second.serve([*DOCUMENT, 8, 8, 8], share=1.0) == 60
    assert share_of(second, DOCUMENT) == 1.0
    third = server()  # the first request that it gets asks for all
    assert third.serve([*DOCUMENT, 9, 9, 9], share=1.0) == 60 and share_of(third, DOCUMENT) == 1.0
    fourth = server()
    assert fourth.serve([*DOCUMENT[:30], *[9] * 5], share=1.0) == 30  # of a prompt that leaves it in the middle
    assert share_of(fourth, DOCUMENT[:30]) == 1.0
    for each in (second, third, fourth):
        assert cache_state(each.harness.tree)["leaked_slots"] == 0
        assert not any(each.harness.tree.guard.errors.values())


def test_files_hold_what_the_host_still_has(tmp_path):
    """Nothing where its memory is full; a server that has it later writes the file again, once."""
    full = complete_server(tmp_path, host_blocks=1)
    full.serve(DOCUMENT)
    (key,) = keys_in(full.segments)
    assert full.segments.get(key).evicted is None
    assert complete_server(tmp_path).serve([*DOCUMENT, 9, 9], share=1.0) == 60
    later = complete_server(tmp_path / "other")
    later.serve(DOCUMENT)
    record = later.segments.get(key)
    assert record.is_complete and full.segments.put(record, full.segments.identity.namespace(None, None)) > 0
    third = complete_server(tmp_path)
    assert third.serve([*DOCUMENT, 9, 9], share=1.0) == 60 and share_of(third, DOCUMENT) == 1.0


@pytest.mark.parametrize("host_blocks", [0, 3])
def test_a_host_without_room_leaves_the_pools_part(tmp_path, host_blocks):
    complete_server(tmp_path).serve(DOCUMENT)
    server = complete_server(tmp_path, host_blocks=host_blocks)
    assert server.serve([*DOCUMENT, 9, 9], share=1.0) == 60
    assert 0 < share_of(server, DOCUMENT) < 0.5 and server.loaded == (1, 60)
    assert server.harness.host.used_bytes == 0 and not any(server.harness.tree.guard.errors.values())


def test_rows_of_other_bits_than_this_servers_are_left_out(tmp_path):
    """A file that somebody has made: its checksum is right, and its rows are not what this server evicts."""
    complete_server(tmp_path).serve(DOCUMENT)
    server = complete_server(tmp_path)
    (key,) = keys_in(server.segments)
    made_up = server.segments.get(key)
    rows = made_up.evicted
    made_up = replace(made_up, evicted=replace(rows, k=rows.k.view(torch.uint8), v=rows.v.view(torch.uint8)))
    server.reader._recent[key] = made_up
    assert server.serve([*DOCUMENT, 9, 9], share=1.0) == 60 and share_of(server, DOCUMENT) < 0.5
    assert server.harness.host.used_bytes == 0 and not any(server.harness.tree.guard.errors.values())


def test_a_file_has_what_was_evicted_in_several_steps_and_from_several_segments(tmp_path):
    """Two steps to the budget, and a path that leaves its first segment in the middle: one group of entries."""
    server = complete_server(tmp_path, num_slots=400, config=COMPLETE.model_copy(update={"min_prefix_tokens": 60}))
    prefixes, resizer = server.prefixes, server.prefixes.resizer
    server.harness.finish(server.harness.run(DOCUMENT[:50]))

    def shrink(prompt):
        path = prefixes._tree.find(prompt, (None, None))
        resizer.is_long_enough = lambda num_tokens: True  # it was too short to be compressed at once
        resizer.compress(path[-1], len(prompt), share=0.5)
        del resizer.is_long_enough
        server.harness.check()
        (segment,) = [each for each in prefixes.table.packed if each.end == len(prompt)]
        resizer.resize(segment, resizer.slots_at(segment, 0.3))
        server.harness.check()

    shrink(DOCUMENT[:50])
    branch = [*DOCUMENT[:20], *[9] * 60]
    server.harness.finish(server.harness.run(branch[:70]))
    shrink(branch[:70])
    assert drained(server.writer)
    records = [server.segments.get(key) for key in keys_in(server.segments)]
    assert sorted((record.start, record.end) for record in records) == [(0, 50), (0, 70)]
    for record in records:
        assert record.is_complete and not any(server.harness.tree.guard.errors.values())
    for prompt in (DOCUMENT[:50], branch[:70]):
        other = complete_server(tmp_path, config=COMPLETE.model_copy(update={"min_prefix_tokens": 60}))
        assert other.serve([*prompt, 8, 8], share=1.0) == len(prompt) and share_of(other, prompt) == 1.0


def test_what_waits_for_the_writer_counts_what_was_evicted(tmp_path, monkeypatch):
    sizes = []
    for config in (COMPLETE.model_copy(update={"store_complete": False}), COMPLETE):
        server = complete_server(tmp_path, config=config)
        monkeypatch.setattr(server.writer, "has_room", lambda num_bytes: bool(sizes.append(num_bytes)))
        server.serve(DOCUMENT)
    assert sizes[1] - sizes[0] > 0 and (sizes[1] - sizes[0]) % server.harness.host.block_bytes == 0
    assert keys_in(server.segments) == []


def test_requests_that_wait_for_the_same_prefix_bring_it_once(tmp_path):
    Server(tmp_path).serve(DOCUMENT)
    server = Server(tmp_path, num_slots=30)
    twins = [server.queue([*DOCUMENT, i]) for i in range(3)]
    assert server.settle(*twins) == set()
    server.harness.check()
    assert (server.prefixes.totals.loaded_segments, server.prefixes.totals.not_placed) == (1, 2)
    assert cache_state(server.harness.tree)["free_slots"] == 30 - 18
    for req in twins:
        assert server.harness.admit(req) and req.prefix_len == 60
    for req in twins:
        server.harness.abort(req)


def test_namespaces_find_their_own(tmp_path):
    Server(tmp_path).serve(DOCUMENT, extra_key="a")
    second = Server(tmp_path)
    assert second.serve([*DOCUMENT, 8, 9], extra_key="a") == 60
    assert second.serve([*DOCUMENT, 9, 9]) == 0 and second.serve([*DOCUMENT, 9, 9], extra_key="b") == 0


def test_what_shrinks_by_steps_is_stored_at_the_budget_only(tmp_path):
    config = KVEvictConfig(budget=0.3, min_budget=0.1, tail_tokens=4, sink_tokens=2, min_prefix_tokens=60)
    server = Server(tmp_path, config=config, num_slots=120)
    manager = server.harness.tree.prefixes
    server.harness.finish(server.harness.run(DOCUMENT[:50]))
    (last,) = [node for node in server.harness.tree.nodes() if len(node.key) == 50]
    resizer, done = manager.resizer, {}
    resizer.is_long_enough = lambda num_tokens: True  # it was too short to be compressed at once
    for share in (0.6, 0.3, 0.1):
        if share == 0.6:
            resizer.compress(last, 50, share=share)
            (segment,) = manager.table.packed
        else:
            resizer.resize(segment, config.num_slots(50, share=share))
        server.harness.check()
        assert drained(server.writer)
        server.saving.between_steps()
        done[share] = server.prefixes.totals.stored_segments
    assert done == {0.6: 0, 0.3: 1, 0.1: 1}
    (key,) = keys_in(server.segments)
    assert server.segments.get(key).kept.num_entries == 15 * 4


def test_who_waits_too_long_goes_on_without(tmp_path, monkeypatch):
    Server(tmp_path).serve(DOCUMENT)
    server = Server(tmp_path)
    monkeypatch.setattr(server.reader._workers, "submit", lambda work: True)  # it never comes to it
    req = server.queue([*DOCUMENT, 9])
    assert server.begin(req) == {req}
    server.now = 1.0
    assert server.loading.settle([req]) == set() and server.prefixes.totals.late_loads == 1


def test_a_request_that_is_aborted_ends_its_fetch(tmp_path):
    server = Server(tmp_path)
    server.serve(DOCUMENT)
    server = Server(tmp_path)
    aborted, waiting, unseen = (server.queue(DOCUMENT) for _ in range(3))
    assert server.begin(aborted, waiting, unseen) == {aborted, waiting, unseen}
    fetches = [server.loading._waiting[req].fetch for req in (aborted, waiting)]
    server.loading.settle([waiting])
    assert [fetch.is_abandoned for fetch in fetches] == [True, False]
    assert server.loading.state()[1] <= 1  # nothing of a request that has left is kept
    assert server.settle(waiting) == set() and server.loading.state()[1] == 0
    assert server.harness.admit(waiting) and waiting.prefix_len > 0


def test_a_store_that_fails_is_told_and_the_prompt_computed(tmp_path, monkeypatch, caplog):
    Server(tmp_path).serve(DOCUMENT)
    server = Server(tmp_path)

    def fail(*_args):
        raise StoreError("unreachable")

    for method in ("get", "get_many", "put", "exists"):
        monkeypatch.setattr(server.segments.backend, method, fail)
    assert server.serve(DOCUMENT) == 0
    assert (server.prefixes.totals.failed_loads, server.prefixes.totals.not_stored) == (1, 1)
    assert "a prefix was not stored" in caplog.text and "unreachable" in caplog.text
    assert cache_state(server.harness.tree)["leaked_slots"] == 0


def test_an_error_nobody_expects_is_held(tmp_path, monkeypatch):
    server = Server(tmp_path)
    monkeypatch.setattr(server.harness.tree.packer, "copy", lambda views: 1 / 0)
    monkeypatch.setattr(server.reader, "start", lambda wanted: 1 / 0)
    assert server.serve(DOCUMENT) == 0
    errors = {place.value: count for place, count in server.harness.tree.guard.errors.items() if count}
    assert errors == {"store": 2}


def test_new_weights_switch_the_store_off(tmp_path, monkeypatch):
    Server(tmp_path).serve(DOCUMENT)
    server = Server(tmp_path)
    fetches = []
    monkeypatch.setattr(server.reader._workers, "submit", lambda work: fetches.append(work) or True)
    waiting = server.queue(DOCUMENT)
    server.loading.settle([waiting])
    server.harness.tree.forget_compressed()
    for finish in fetches:
        finish()  # it comes when nothing may be loaded any more
    assert server.loading.settle([waiting]) == set() and not server.access.is_on
    assert server.loaded == (0, 0)
    late = server.harness.request([*DOCUMENT, 8])
    fetch(SimpleNamespace(tree_cache=server.harness.tree), late)
    assert server.loading.state()[1] == 0
    server.harness.finish(server.harness.run(DOCUMENT))
    assert drained(server.writer)
    server.saving.between_steps()
    assert server.prefixes.totals.stored_segments == 0 and server.loaded == (0, 0)


def test_a_document_behind_a_shared_header_needs_no_other_document(tmp_path):
    """As behind every chat header: the second document's segment begins where the first one's path is left."""
    documents = [[*DOCUMENT[:10], *((i * step) % 11 for i in range(1, 51))] for step in (3, 5)]
    first = Server(tmp_path, num_slots=200)
    for document in documents:
        first.serve(document)
    assert {span.segment.start for span in first.harness.tree.spans.values()} == {0, 10}
    for i in (0, 1):
        second = Server(tmp_path, num_slots=200)
        assert second.serve([*documents[i], 9, 9, 9]) == 60
        assert second.loaded == (1, 60)
        other = documents[1 - i]
        assert second.serve([*other, 8, 8, 8]) == 60  # the header is there; the rest of it comes
        assert second.loaded == (2, 110)
        assert cache_state(second.harness.tree)["leaked_slots"] == 0


def test_prefixes_are_fetched_for_the_head_of_the_queue_first(tmp_path):
    Server(tmp_path).serve(DOCUMENT)
    server = Server(tmp_path, num_slots=200)
    queue = [server.queue([*DOCUMENT, i % 11]) for i in range(READ_AHEAD + 2)]
    short = server.harness.request([1, 2, 3])
    assert server.begin(short, *queue) == set(queue)
    assert drained(server.reader._workers)
    assert server.loading.settle([short, *queue]) == set(queue[READ_AHEAD - 1 :])  # it is not yet their turn
    assert server.settle(*queue[READ_AHEAD - 1 :]) == set()
    assert server.loading.state()[1] == 0 and server.prefixes.totals.loaded_segments == 1


def test_nobody_waits_for_ever_behind_those_whose_turn_it_is(tmp_path, monkeypatch):
    Server(tmp_path).serve(DOCUMENT)
    server = Server(tmp_path, num_slots=200)
    queue = [server.queue([*DOCUMENT, i % 11]) for i in range(READ_AHEAD + 2)]
    assert server.begin(*queue) == set(queue)
    server.now = 1.0  # all that were begun have come, and stay in the queue: others run
    assert drained(server.reader._workers)
    assert server.loading.settle(queue) == set()
    assert server.settle(*queue[READ_AHEAD:]) == set()  # when it is their turn in the end, they are looked for
    assert server.loading.state()[1] == 0


def test_a_working_set_of_many_times_the_pool_comes_back_from_the_store(tmp_path):
    """What was dropped is loaded again, never computed; who is loaded pushes others out, as any insertion does."""
    documents = [[*DOCUMENT[:5], *((i * i * step + step) % 11 for i in range(55))] for step in range(1, 11)]
    for document in documents:
        Server(tmp_path, num_slots=200).serve(document)
    server = Server(tmp_path, num_slots=60)  # of 600 tokens; 75 hold them all, shrunk
    for turn in range(4):
        for number, document in enumerate(documents):
            assert server.serve([*document[:56], turn, number % 11, 9]) >= 55, (turn, number)
    assert server.prefixes.totals.loaded_segments >= 30 and server.prefixes.totals.late_loads == 0
    assert cache_state(server.harness.tree)["leaked_slots"] == 0


def test_clients_are_told_what_came_from_the_pool_the_host_and_the_store(tmp_path):
    """A path of three turns: the first in the pool, the second on the host, the third in the store."""
    turns = [DOCUMENT, [*DOCUMENT, *DOCUMENT[::-1]], [*DOCUMENT, *DOCUMENT[::-1], *DOCUMENT]]
    first = Server(tmp_path, num_slots=300)
    for turn in turns:
        first.serve(turn)
    second = Server(tmp_path, num_slots=300, host_blocks=200)
    req = second.queue(turns[1])
    assert second.settle(req) == set() and second.harness.admit(req)
    assert (req.cached_tokens_device, req.cached_tokens_host) == (0, 0)
    assert req.cached_tokens_storage == req.prefix_len > len(DOCUMENT)
    second.harness._cancel(req)
    store_start = len(turns[1])
    while (held := second.harness.tree.held_slots()) and second.harness.evict(1):
        assert second.harness.tree.held_slots() < held
    again = second.queue(turns[2])
    assert second.settle(again) == set() and second.harness.admit(again)
    found = again.cached_tokens_device, again.cached_tokens_host, again.cached_tokens_storage
    assert found == (0, store_start, again.prefix_len - store_start) and again.prefix_len == len(turns[2])


def test_a_prompt_with_overridden_embeddings_waits_for_no_fetch(tmp_path):
    """SGLang finds nothing for it: other tokens' K and V."""
    server = Server(tmp_path)
    server.serve(DOCUMENT)
    req = server.harness.request([*DOCUMENT, 9])
    req.positional_embed_overrides = object()
    fetch(SimpleNamespace(tree_cache=server.harness.tree), req)
    assert server.loading.state()[1] == 0


def test_what_an_adapter_made_is_neither_stored_nor_looked_for(tmp_path):
    """What SGLang appends to a key cannot be told from a key that ends like it (a uuid): the request is asked."""
    adapter = "0123456789abcdef" * 2
    server = Server(tmp_path, num_slots=300)
    scheduler = SimpleNamespace(tree_cache=server.harness.tree)
    cases = ((None, adapter), ("tenant", adapter), ("tenant", None), ("f" * 32, None), ("tenant" + "f" * 32, None))
    num_stored = 0
    for extra_key, lora_id in cases:
        assert server.serve(DOCUMENT, extra_key=extra_key, lora_id=lora_id) == 0
        num_stored += lora_id is None
        assert len(keys_in(server.segments)) == num_stored
        req = server.harness.request([*DOCUMENT, 9], extra_key, lora_id=lora_id)
        fetch(scheduler, req)
        assert server.loading.state()[1] == (lora_id is None)
        server.loading.clear()


def test_a_server_that_stops_writes_what_waits(tmp_path, monkeypatch):
    server = Server(tmp_path, num_slots=200)
    gate, put = threading.Event(), server.segments.put
    monkeypatch.setattr(server.segments, "put", lambda *args: gate.wait(300) and put(*args))
    server.harness.finish(server.harness.run(DOCUMENT))
    assert server.prefixes.store_state()["waiting"] == 1
    assert server.prefixes.switch_store_off() and server.writer.close(0.01) == 1  # in bounded time
    gate.set()
    server.harness.tree.release_host_resources()
    assert len(keys_in(server.segments)) == 1
    server.harness.finish(server.harness.run([7] * 40))
    assert server.writer.num_waiting == 0  # nothing new is taken


@pytest.mark.parametrize("is_complete", [False, True])
def test_random_traffic_with_restarts_keeps_every_slot(tmp_path, is_complete):
    """Small pools, shared beginnings, loads that push others out: contents and conservation after every step."""
    documents = [[*DOCUMENT[:12], *((i * step) % 11 for i in range(1, 49))] for step in (3, 5, 8)]
    for start in range(3):
        server = complete_server(tmp_path, num_slots=110) if is_complete else Server(tmp_path, num_slots=110)
        for i in range(9):
            document = documents[(i + start) % 3]
            server.serve([*document[: 60 - 7 * (i % 3)], *([i] * 6)], share=i % 2)
            server.harness.turn()
        assert cache_state(server.harness.tree)["leaked_slots"] == 0
        assert server.harness.tree.guard.errors == dict.fromkeys(server.harness.tree.guard.errors, 0)
        assert (server.prefixes.totals.loaded_segments > 0) == (start > 0)


def test_who_waits_is_passed_over_and_keeps_its_place(tmp_path):
    server = Server(tmp_path)
    a, b, c, d = (server.harness.request([1, 2, i]) for i in range(4))
    server.loading.settle = lambda queue: {a, c}
    scheduler = SimpleNamespace(tree_cache=server.harness.tree, waiting_queue=[a, b, c], chunked_req=None)
    seen = []

    def admit(scheduler):
        seen.append(list(scheduler.waiting_queue))
        scheduler.waiting_queue = [*scheduler.waiting_queue[1:], d]  # b is admitted, d comes back
        return "plan"

    assert without_waiting(admit, scheduler) == "plan"
    assert seen == [[b]] and scheduler.waiting_queue == [a, c, d]

    def fail(scheduler):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError):
        without_waiting(fail, scheduler)
    assert scheduler.waiting_queue == [a, c, d]


def test_segments_of_other_statistics_are_not_found(tmp_path):
    """Rows of 4 bits are read with the statistics that they were written with, which may be learned late."""

    def server(statistics):
        made = Server(tmp_path, num_slots=200)
        read_with(made.access, statistics)
        return made

    assert server("ab" * 32).serve(DOCUMENT) == 0
    prompt = [*DOCUMENT, 9, 9, 9]
    assert server("cd" * 32).serve(prompt) == 0 and server("").serve(prompt) == 0
    assert server("ab" * 32).serve(prompt) == 60
