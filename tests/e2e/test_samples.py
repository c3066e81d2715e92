"""``n > 1`` on a real server: SGLang sends a hidden request first, and then the samples, one after the other."""

from __future__ import annotations

import json
import random

import pytest

from helpers.modes import assert_nothing_leaked
from helpers.tiny_model import VOCAB_SIZE
from helpers.traffic import idle_state
from kvevict_tools.launcher import FLOAT32_FLAGS
from kvevict_tools.measure import flush

PROMPT = random.Random(7).choices(range(3, VOCAB_SIZE), k=300)


@pytest.fixture(scope="module", params=[8, 1], ids=["together", "one at a time"])
def server(start, tiny_llama, request):
    """Where one request runs at a time, each sample but the first one begins when the one before has ended."""
    flags = ("--skip-tokenizer-init", "--max-total-tokens", "2000", "--max-running-requests", str(request.param))
    return start(tiny_llama, *flags, *FLOAT32_FLAGS, config={"min_prefix_tokens": 48, "tail_tokens": 16})


def ask(server, n: int, **sampling):
    """The answers to the prompt on an empty cache, and how much the counters counted."""
    flush(server)
    before = idle_state(server)
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, "n": n} | sampling
    answers = json.loads(server.post("/generate", {"input_ids": PROMPT, "sampling_params": sampling}))
    after = idle_state(server)
    assert_nothing_leaked(server)
    names = ("prompts", "prompt_tokens", "found_tokens")
    return answers if n > 1 else [answers], tuple(after[name] - before[name] for name in names)


def test_samples_begin_as_one_request_does_and_count_as_one(server):
    """A sample that runs while others have not begun goes on with an uncompressed prompt; so the first token counts."""
    (alone,), counted = ask(server, 1)
    assert idle_state(server)["spans"] > 0
    samples, counted_of_samples = ask(server, 3)
    assert idle_state(server)["spans"] > 0
    assert [sample["output_ids"][0] for sample in samples] == [alone["output_ids"][0]] * 3
    assert [sample["meta_info"]["cached_tokens"] for sample in samples] == [len(PROMPT) - 1] * 3
    assert counted_of_samples == counted == (1, len(PROMPT), 0)
