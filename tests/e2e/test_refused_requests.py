"""Requests that end stock SGLang, and beams, are refused with status 400, and the server answers the next one."""

from __future__ import annotations

import pytest

from helpers.traffic import reply_to

TINY = ("--skip-tokenizer-init", "--max-total-tokens", "2000", "--context-length", "1024")
PROMPT = list(range(5, 25))
DEADLY = {
    "a negative id": ({"input_ids": [-1, 5]}, "input_ids: got -1 at position 0; allowed: 0 to "),
    "an id beyond the vocabulary": ({"input_ids": [5, 10**6]}, "input_ids: got 1000000 at position 1"),
    "one of a batch": ({"input_ids": [PROMPT, [5, 10**6]]}, "input_ids: got 1000000 at position 1"),
    "more top tokens than there are": ({"return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num: got"),
    "a start before the prompt": ({"return_logprob": True, "logprob_start_len": -5}, "logprob_start_len: got -5"),
    "no tokens beside some": ({"input_ids": [PROMPT, []]}, "got no tokens"),
    "beams": ({"sampling_params": {"temperature": 0, "beam_width": 2}}, "beam search"),
    "top_k beyond 32 bits": ({"sampling_params": {"top_k": 2**40}}, "top_k: got 1099511627776"),
}


def post(server, **body):
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 3}, **body}
    return reply_to(server, body)


@pytest.fixture(scope="module")
def server(start, tiny_llama):
    return start(tiny_llama, *TINY, config={"policy": "snapkv"})


@pytest.mark.parametrize("name", DEADLY)
def test_what_ends_stock_is_refused(server, name):
    body, message = DEADLY[name]
    status, error = post(server, **body)
    assert (status, message in str(error)) == (400, True), error
    assert post(server)[0] == 200
