"""Prompts longer than the pool on real servers, with strict checks."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.modes import assert_nothing_leaked
from helpers.tiny_model import VOCAB_SIZE
from helpers.traffic import idle_state, reply_to
from kvevict_tools.launcher import FLOAT32_FLAGS
from kvevict_tools.measure import flush, plugin_state
from sgl_kvevict.client import CacheReport

POOL = 400
SHORT = ("--skip-tokenizer-init", "--max-total-tokens", str(POOL))
FLAGS = (*SHORT, "--context-length", "4096")
CONFIG = {"min_prefix_tokens": 48, "tail_tokens": 16}
MODES = {
    "overlap": ("--chunked-prefill-size", "1024"),
    "mixed chunks, no overlap": ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--disable-overlap-schedule"),
}


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return MODES[request.param]


@pytest.fixture(scope="module")
def server(start, tiny_llama, mode):
    return start(tiny_llama, *FLAGS, *mode, config=CONFIG)


@pytest.fixture(scope="module")
def ranks(start, tiny_llama, tmp_path_factory):
    """Two tensor-parallel ranks with a store.

    Without memory of the host: with it a prefix may be dropped to it before it was as small as what is stored.
    """
    store = str(tmp_path_factory.mktemp("store"))
    config = CONFIG | {"store": store, "host_bytes": 0}
    flags = ("--tp-size", "2", *FLOAT32_FLAGS, "--chunked-prefill-size", "1024")
    return start(tiny_llama, *FLAGS, *flags, config=config, env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=num_tokens)


def ask(server, tokens: list[int], num_new: int = 8, **fields) -> tuple[int, dict]:
    """Status, and the answer or the error."""
    sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True, **fields.pop("sampling", {})}
    return reply_to(server, {"input_ids": tokens, "sampling_params": sampling, **fields})


def test_more_than_three_times_the_pool_is_answered_and_found_again(server):
    tokens = prompt(int(3.5 * POOL))
    status, first = ask(server, tokens)
    assert status == 200 and len(first["output_ids"]) == 8
    compressed = CacheReport.of(first["meta_info"]).prefilled_compressed
    assert 2.5 * POOL < compressed < 3.5 * POOL
    status, again = ask(server, [*tokens, 5, 6, 7])
    assert status == 200 and again["meta_info"]["cached_tokens"] >= compressed
    assert_nothing_leaked(server)


def test_prompts_that_fit_are_answered_as_by_a_server_that_has_none_longer(server, start, tiny_llama, mode):
    """Tokens and log-probabilities, bit for bit, from an empty cache: what is cached shrinks, also while it is read."""
    plain = start(tiny_llama, *SHORT, "--context-length", str(POOL - 5), *mode, config=CONFIG)
    for seed, length in enumerate([20, 100, 250, 340] * 3):
        answers = []
        for each in (server, plain):
            flush(each)
            answers.append(ask(each, prompt(length, 50 + seed), return_logprob=True))
        assert answers[0][0] == answers[1][0] == 200
        first, second = ([a["output_ids"], a["meta_info"]["output_token_logprobs"]] for _, a in answers)
        assert first == second
    plain.stop(grace_s=0)


def test_requests_of_which_nothing_is_cached_are_served_and_harm_nobody(server):
    """Twenty at once in a pool that holds two, so that some are retracted, beside ordinary ones; then one too long."""
    cached = prompt(200, seed=70)
    assert ask(server, cached)[0] == 200
    lengths = [150 + 5 * i for i in range(20)]
    fields = [{"bootstrap_host": "2.2.2.2"}, {"bootstrap_host": "2.2.2.2"}, {}]
    with ThreadPoolExecutor(len(lengths)) as pool:
        jobs = [pool.submit(ask, server, prompt(n, 71 + n), 60, **fields[n // 5 % 3]) for n in lengths]
        answers = [job.result() for job in jobs]
    assert [(status, len(answer["output_ids"])) for status, answer in answers] == [(200, 60)] * len(lengths)
    before = idle_state(server)
    assert ask(server, prompt(int(1.5 * POOL), seed=72), bootstrap_host="2.2.2.2")[0] == 400
    after = idle_state(server)
    names = ("compressions", "resizes", "dropped_spans", "free_slots")
    assert [after[name] for name in names] == [before[name] for name in names]
    assert ask(server, cached, num_new=0, bootstrap_host="2.2.2.2")[0] == 200
    assert_nothing_leaked(server)


def test_several_at_once_and_others_beside_them(server):
    """One is prefilled at a time; requests that generate meanwhile are not retracted for it."""
    lengths = [3 * POOL, 20, 900, 30, 2 * POOL, 25, 1500]
    with ThreadPoolExecutor(len(lengths)) as pool:
        answers = list(pool.map(lambda i: ask(server, prompt(lengths[i], 10 + i), num_new=40), range(len(lengths))))
    assert [(status, len(answer["output_ids"])) for status, answer in answers] == [(200, 40)] * len(lengths)
    assert assert_nothing_leaked(server) > 10


def test_an_abort_in_the_middle_leaves_nothing_behind(server):
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(ask, server, prompt(2000, seed=30), rid="stopped")
        while not under_way.done() and not plugin_state(server)["readers"]:
            time.sleep(0.01)
        server.post("/abort_request", {"rid": "stopped"})
        under_way.result()
    assert ask(server, prompt(3 * POOL, seed=31))[0] == 200
    assert_nothing_leaked(server)


def test_ranks_and_namespaces(ranks):
    for seed, tenant in enumerate(["first", "second"]):
        tokens = prompt(1000 + 100 * seed, seed)
        status, answer = ask(ranks, tokens, extra_key=tenant)
        assert status == 200 and CacheReport.of(answer["meta_info"]).prefilled_compressed > 500
        assert ask(ranks, [*tokens, 5, 6, 7], extra_key=tenant)[1]["meta_info"]["cached_tokens"] > 500
        assert ask(ranks, tokens, extra_key="third")[1]["meta_info"]["cached_tokens"] == 0
    state = idle_state(ranks)
    assert state["prefilled_compressed"] == 4
    assert_nothing_leaked(ranks)
