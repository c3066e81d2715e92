"""What clients and operators may send at any moment: nothing of it ends the server, reaches others or survives."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer

from helpers.event_sockets import wait_until
from helpers.tiny_model import save_tiny_llama
from helpers.traffic import assert_all_slots_are_back, generate, numbers
from kvevict_tools.launcher import FLOAT32_FLAGS
from kvevict_tools.measure import flush, plugin_state

CONFIG = {"policy": "snapkv", "min_prefix_tokens": 48, "tail_tokens": 16, "policy_options": {"window_size": 16}}
FLAGS = ("--skip-tokenizer-init", "--max-total-tokens", "6000", "--context-length", "1024", *FLOAT32_FLAGS)


@pytest.fixture(scope="module")
def server(start, tiny_llama):
    return start(tiny_llama, *FLAGS, config=CONFIG)


@pytest.fixture(autouse=True)
def unharmed(server):
    """After each test: no error line, no leak, and the server answers."""
    yield
    assert len(generate(server, [5, 6, 7], 3)["output_ids"]) == 3
    assert_all_slots_are_back(server)


def document(seed: int) -> list[int]:
    return numbers(seed, 400)


def ask(server, input_ids, max_new_tokens=4, **fields):
    return generate(server, input_ids, max_new_tokens, **fields)


def compress(server, seed: int) -> None:
    """Have a document compressed."""
    ask(server, document(seed), 0)
    assert plugin_state(server)["spans"] > 0


@pytest.mark.parametrize("theirs", ["text", ["list"], 5, 1.5, True, {"other": {"kvevict": 1}}, {"kvevict": None}])
def test_custom_params_that_are_not_ours_pass(server, theirs):
    assert len(ask(server, [5, 6, 7], custom_params=theirs)["output_ids"]) == 4


def test_names_are_no_identities(server):
    """One that is in use again while its first bearer still runs."""
    flush(server)
    prompts = [document(i)[:40] for i in range(1, 5)]  # too short to be compressed: the same answer at any time
    alone = [ask(server, prompt, 40)["output_ids"] for prompt in prompts]

    def again(prompt):
        with contextlib.suppress(urllib.error.HTTPError):  # SGLang refuses a name that it knows to be in use
            return ask(server, prompt, 40, rid="twin")["output_ids"]

    def abort(_):
        time.sleep(0.02)
        server.post("/abort_request", {"rid": "twin"})

    with ThreadPoolExecutor(8) as pool:
        for prompt, expected in zip(prompts, alone, strict=True):
            answers = [pool.submit(again, prompt), pool.submit(abort, 0), pool.submit(again, prompt)]
            for answer in (answers[0].result(), answers[2].result()):
                assert answer is None or answer == expected[: len(answer)]


def test_log_probabilities_of_a_prompt_are_exact_from_its_beginning(server):
    def logprobs(start: int) -> list[float]:
        answer = ask(server, [*document(6), 7], 1, return_logprob=True, logprob_start_len=start)
        return [value for value, *_ in answer["meta_info"]["input_token_logprobs"][1:]]

    flush(server)
    expected = logprobs(0)
    compress(server, 6)
    assert logprobs(0) == pytest.approx(expected, abs=1e-3)
    # From the middle on, what is before is read from the cache: they are those of the compressed prefix.
    assert logprobs(300) != pytest.approx(expected[300:], abs=1e-3)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory, tiny_llama):
    return save_tiny_llama(tmp_path_factory.mktemp("other-llama"), seed=1)


@pytest.mark.parametrize("flush_cache", [True, False])
def test_nothing_compressed_survives_new_weights(server, tiny_llama, other_weights, flush_cache):
    flush(server)
    compress(server, 4)
    assert ask(server, [*document(4), 7])["meta_info"]["cached_tokens"] == 400
    with ThreadPoolExecutor(1) as pool:
        reader = None
        if not flush_cache:
            # One that reads the compressed prefix all along. SGLang waits for such requests before it changes the
            # weights, unless it is paused; a flush beside them would be refused.
            reader = pool.submit(ask, server, [*document(4), 8], 500)
            wait_until(lambda: plugin_state(server)["readers"] > 0)
            server.post("/pause_generation", {"mode": "in_place"})
        reply = server.post(
            "/update_weights_from_disk",
            {"model_path": str(other_weights), "flush_cache": flush_cache, "abort_all_requests": False},
        )
        assert json.loads(reply)["success"]
        if reader is not None:
            assert not reader.done() and plugin_state(server)["spans"] > 0
            server.post("/continue_generation", {})
        answer = ask(server, [*document(4), 9], 1)
        assert answer["meta_info"]["cached_tokens"] == 0
        if reader is not None:
            assert len(reader.result()["output_ids"]) == 500
    assert plugin_state(server)["spans"] == 1  # of the new weights
    fresh = ask(server, [*document(5), 9])["output_ids"]
    server.post("/update_weights_from_disk", {"model_path": str(tiny_llama), "flush_cache": True})
    assert ask(server, [*document(5), 9])["output_ids"] != fresh  # the weights did change


@pytest.fixture
def shared_by_file():
    """PyTorch hands tensors to other processes by file names, not by open files, while a test runs."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.usefixtures("shared_by_file")
def test_nothing_compressed_survives_new_tensors(server, other_weights):
    """Without a session SGLang refuses them, and nothing is forgotten."""
    flush(server)
    compress(server, 6)
    before = ask(server, [*document(5), 9])["output_ids"]
    spans = plugin_state(server)["spans"]
    tensors = list(load_file(other_weights / "model.safetensors").items())
    body = {"serialized_named_tensors": [MultiprocessingSerializer.serialize(tensors, output_str=True)]}
    with pytest.raises(urllib.error.HTTPError) as error:
        server.post("/update_weights_from_tensor", body | {"flush_cache": False})
    assert error.value.code == 400 and plugin_state(server)["spans"] == spans
    server.post("/begin_weight_update", {})
    server.post("/update_weights_from_tensor", body | {"flush_cache": False})
    server.post("/end_weight_update", {})
    assert plugin_state(server)["spans"] == 0
    assert ask(server, [*document(6), 9], 1)["meta_info"]["cached_tokens"] == 0
    assert ask(server, [*document(5), 9])["output_ids"] != before  # the weights did change
