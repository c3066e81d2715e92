"""Requests that ask something impossible of the server are refused before they are queued."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.sampling.sampling_params import SamplingParams

from helpers.harness import Harness
from helpers.scheduling import MiniScheduler
from sgl_kvevict.sglang_adapter.request_check import BEAMS, check, refusal


def test_nobody_else_names_the_namespace_of_an_adapter(harness):
    """SGLang appends an adapter's id to the client's key; a client could write the same text."""
    scheduler = SimpleNamespace(tree_cache=harness.tree, model_config=SimpleNamespace(vocab_size=64))
    adapter = LoRARef.deterministic_id("adapter", "/path")  # of --lora-paths; anybody can compute it

    def refused(extra_key, lora_id=None):
        return refusal(scheduler, harness.tree, harness.request([1, 2, 3], extra_key, lora_id=lora_id))

    assert refused("tenant" + adapter) is None  # there is no such adapter
    harness.adapters.register(lora_id=adapter, lora_name="adapter")
    why = f'extra_key: got "tenant{adapter}", which ends with a LoRA adapter\'s id;'
    assert refused("tenant" + adapter).startswith(why)  # also before its first request: that would find what is here
    assert refused(adapter).startswith("extra_key: got")
    harness.finish(harness.run([*range(20)], "tenant", lora_id=adapter))
    harness.tree.reset()
    assert refused("tenant" + adapter).startswith(why)  # also when the tree has nothing of it: the host may
    assert refused("tenant", adapter) is refused("tenant") is refused(None) is refused(adapter + "x") is None


def test_a_refused_request_leaves_nothing_in_the_namespace_that_it_named(monkeypatch):
    """SGLang still computes one token of it, number 0, with which all prompts of some models begin."""
    monkeypatch.setattr("sglang.srt.managers.schedule_batch.get_parallel", lambda: SimpleNamespace(tp_rank=0))
    harness, adapter = Harness(), LoRARef().lora_id
    harness.adapters.register(lora_id=adapter, lora_name="adapter")
    req = harness.request([1, 2, 3], adapter)
    check(MiniScheduler(harness), req)
    assert req.to_finish is not None
    assert harness.admit(req) and harness.prefill(req) and req not in harness.live
    assert list(harness.tree.nodes()) == []


def test_a_server_with_stock_s_cache_is_left_alone():
    req = SimpleNamespace(sampling_params=SimpleNamespace(custom_params={"kvevict": "anything"}))
    check(SimpleNamespace(tree_cache=object()), req)


def test_beams_are_refused_and_their_group_ends(monkeypatch):
    monkeypatch.setattr("sglang.srt.managers.schedule_batch.get_parallel", lambda: SimpleNamespace(tp_rank=0))
    harness, coordinator = Harness(), MagicMock()
    req = harness.request([1, 2, 3])
    group = req.beam_group = object()
    coordinator.retire_group.side_effect = lambda req: ended.append(req.beam_group)
    ended: list[object] = []
    scheduler = SimpleNamespace(tree_cache=harness.tree, beam_coordinator=coordinator)
    check(scheduler, req)
    assert ended == [group] and req.beam_group is None
    assert req.to_finish.message == BEAMS


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "input_ids: got no tokens; allowed: at least one"),
        ([-1, 5], "input_ids: got -1 at position 0; allowed: 0 to 63"),
        ([63, 5, 64], "input_ids: got 64 at position 2; allowed: 0 to 63"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(harness, tokens, message):
    scheduler = MiniScheduler(harness)
    assert refusal(scheduler, harness.tree, harness.request(tokens)) == message
    assert refusal(scheduler, harness.tree, harness.request([0, 63])) is None


@pytest.mark.parametrize(
    ("sampling", "fields", "message"),
    [
        ({"custom_params": {"kvevict": {"exact": 1}}}, {}, "kvevict.exact: got 1; allowed: true or false"),
        ({"top_k": 2**31}, {}, "top_k: got 2147483648; allowed: -1, or 1 to 2147483647"),
        (
            {"min_new_tokens": 1, "stop_token_ids": [5, 64]},
            {},
            "stop_token_ids: got 64 with min_new_tokens; allowed: 0",
        ),
        ({"min_new_tokens": 1, "stop_token_ids": [-1]}, {}, "stop_token_ids: got -1 with min_new_tokens; allowed: 0"),
        ({}, {"top_logprobs_num": 65}, "top_logprobs_num: got 65; allowed: at most 64"),
        ({}, {"logprob_start_len": -2}, "logprob_start_len: got -2; allowed: -1, or"),
    ],
)
def test_what_is_wrong_or_would_end_the_server_is_refused_and_taken_off_the_batch(harness, sampling, fields, message):
    req = harness.request([1, 2])
    req.sampling_params = SamplingParams(**sampling)
    req.return_logprob = bool(fields)
    req.logprob.top_logprobs_num = fields.get("top_logprobs_num", 0)
    req.logprob_start_len = fields.get("logprob_start_len", -1)
    reasons = []
    req.set_finish_with_abort = lambda reason, _: reasons.append(reason)
    check(MiniScheduler(harness), req)
    assert len(reasons) == 1 and message in reasons[0]
    left = req.sampling_params
    assert (left.min_new_tokens, left.stop_token_ids, left.max_new_tokens, left.stop_strs) == (0, None, 1, [])
    assert left.custom_params is None and left.top_k <= 2**30 and req.logprob.top_logprobs_num == 0


def test_what_stock_serves_passes(harness):
    req = harness.request([1, 2])
    req.sampling_params = SamplingParams(stop_token_ids=[-1, 64], top_k=2**31 - 1)
    req.return_logprob, req.logprob.top_logprobs_num, req.logprob_start_len = True, 64, -1
    assert refusal(MiniScheduler(harness), harness.tree, req) is None
