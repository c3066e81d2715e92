"""Two tensor-parallel ranks on a CPU: the answers of the whole model, and the same slots on both ranks."""

from __future__ import annotations

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

from transformers import LlamaForCausalLM

from helpers.event_sockets import wait_until
from helpers.tiny_model import TIE, VOCAB_SIZE, lag
from helpers.traffic import RETRACTIONS, assert_all_slots_are_back, generate, idle_state, random_jobs, run_jobs
from kvevict_tools.launcher import FLOAT32_FLAGS
from sgl_kvevict.cli.inspect import asked
from sgl_kvevict.client import CacheReport
from sgl_kvevict.events.questions import Status, StatusReport

FLAGS = (
    *("--tp-size", "2", *FLOAT32_FLAGS, "--skip-tokenizer-init"),
    *("--max-total-tokens", "2000", "--context-length", "1024"),
)
CONFIG = {"min_prefix_tokens": 48, "tail_tokens": 16}


def assert_same_ranks(state):
    first, second = state["ranks"]
    assert first == second


def test_outputs_are_those_of_the_whole_model_at_budget_one(start, tiny_llama):
    """Greedy tokens of one process that holds all heads (transformers, float32), under pressure on the slots."""
    config = {**CONFIG, "policy": "ada-snapkv", "policy_options": {"window_size": 16}, "budget": 1.0}
    server = start(tiny_llama, *FLAGS, "--chunked-prefill-size", "128", config=config, env=RETRACTIONS)
    jobs = random_jobs(60, seed=3, vocab_size=VOCAB_SIZE, aborts=False)
    outputs = run_jobs(server, jobs, concurrency=24)
    state = assert_all_slots_are_back(server)
    server.stop(grace_s=0)
    assert state["compressions"] > 5 and state["max_sharers"] > 1
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    worst = [lag(model, job.input_ids, outputs[job.rid]) for job in jobs if job.max_new_tokens]
    assert max(worst) < TIE


def totals_of(endpoint):
    return asked(endpoint, 20.0, lambda client: client.ask(Status(), StatusReport)).totals


def split_and_drop(server, endpoint, num_documents):
    """Have documents compressed, cut each, drop the lower halves: what is left has another size on each rank."""
    rng = random.Random(0)

    def tokens(count):
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]

    for _ in range(num_documents):
        document = tokens(400)
        generate(server, document, 0)
        generate(server, document[:150] + tokens(20), 1)
    for _ in range(60):  # prompts that nobody asks again go first, until the halves were left alone for long enough
        generate(server, tokens(400), 1)
        assert_same_ranks(idle_state(server))
        if totals_of(endpoint).repacks >= num_documents:
            return
    raise AssertionError(f"nothing drops the halves: {totals_of(endpoint)}")


def test_slots_stay_equal_and_come_back(start, tiny_llama, tmp_path):
    """Splits, drops, repacks, aborts and retractions at budget 0.2, watched all the time."""
    endpoint = f"ipc://{tmp_path}/events"
    policy = {"policy": "snapkv", "policy_options": {"window_size": 16}}
    config = {**CONFIG, **policy, "events": {"endpoint": endpoint}}
    server = start(tiny_llama, *FLAGS, "--enable-metrics", config=config, env=RETRACTIONS)
    split_and_drop(server, endpoint, num_documents=3)
    totals = totals_of(endpoint)
    assert min(totals.compressions, totals.splits) >= 3
    jobs = random_jobs(120, seed=1, vocab_size=VOCAB_SIZE)
    num_looks = 0
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_jobs, server, jobs, 16)
        while not running.done():
            assert_same_ranks(server.get_json("/server_info")["internal_states"][0]["kvevict"])
            num_looks += 1
            time.sleep(0.2)
    running.result()
    assert num_looks > 5
    assert_all_slots_are_back(server)
    totals = totals_of(endpoint)
    assert "#retracted_reqs" in server.log()
    assert server.log().count("kvevict: policy='snapkv'") == 1
    server.post("/flush_cache?timeout=60")
    state = assert_all_slots_are_back(server)
    assert state["free_slots"] == state["total_slots"] and state["spans"] == 0

    def written() -> list[float]:
        """Of one rank, once a second."""
        found = re.findall(r"^kvevict:compressions_total\{.*\} (\S+)$", server.get_text("/metrics"), re.MULTILINE)
        return list(map(float, found))

    wait_until(lambda: written() == [totals.compressions])


def test_ranks_load_their_parts_of_a_prefix_after_a_restart(start, tiny_llama, tmp_path):
    config = {**CONFIG, "policy": "snapkv", "policy_options": {"window_size": 16}, "store": str(tmp_path / "store")}
    rng = random.Random(4)
    document = [rng.randrange(3, VOCAB_SIZE) for _ in range(400)]
    question = [*document, *(rng.randrange(3, VOCAB_SIZE) for _ in range(9))]
    answers = []
    for number in range(2):
        server = start(tiny_llama, *FLAGS, config=config, env={**RETRACTIONS, "SGLANG_TEST_RETRACT": "0"})
        if number == 0:
            generate(server, document, 1)
        reply = generate(server, question, 12)
        report = CacheReport.of(reply["meta_info"])
        answers.append((reply["output_ids"], reply["meta_info"]["cached_tokens"], report.compressed))
        assert (report.storage if number else report.device) >= 400 == report.compressed.num_tokens
        assert 0.15 < report.compressed.share < 0.6
        state = assert_all_slots_are_back(server)
        assert state["loaded_segments"] == number
        while len(list((tmp_path / "store").rglob("segments/*/*"))) < 2:
            time.sleep(0.1)
        server.stop(grace_s=0)
    assert answers[0] == answers[1] and answers[1][1] >= 400
    assert len(list((tmp_path / "store").rglob("identity.json"))) == 2  # each rank has its own
