"""Draft models that read the target's hidden states: keys of the tree are pairs of tokens, answers are the same."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.draft_models import greedy, save_eagle, save_eagle3, save_mimo, save_target
from helpers.event_sockets import wait_until
from helpers.tiny_model import VOCAB_SIZE
from helpers.traffic import generate, idle_state, random_jobs, run_jobs

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

FLAGS = ("--dtype", "float32", "--max-total-tokens", "3000", "--context-length", "1024")
CONFIG = {"policy": "ada-snapkv", "min_prefix_tokens": 48, "tail_tokens": 16, "policy_options": {"window_size": 16}}
CHAINS = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
TREES = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6")
NEW_TOKENS = 40


def numbers(seed, count):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


DOCUMENT = numbers(0, 600)
PROMPTS = [DOCUMENT + numbers(seed, 7) for seed in range(1, 4)] + [DOCUMENT[:300] + numbers(4, 7), numbers(6, 30)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plain(target):
    """Answers without speculation."""
    return [greedy(target, prompt, NEW_TOKENS) for prompt in PROMPTS]


def answers(server):
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        results = list(pool.map(lambda prompt: generate(server, prompt, NEW_TOKENS), PROMPTS))
    return [result["output_ids"] for result in results], [result["meta_info"] for result in results]


def assert_all_slots_are_back(server):
    server.check_alive()
    state = idle_state(server)
    assert state["leaked_slots"] == 0 and state["errors"] == {} and server.leak_messages() == []
    assert state["free_slots"] + state["evictable_slots"] == state["total_slots"]
    return state


@pytest.mark.parametrize(
    ("algorithm", "shape", "least_accepted"), [("EAGLE3", TREES, 1.15), ("NEXTN", CHAINS, 1.3)], ids=["eagle3", "nextn"]
)
def test_all_is_kept_and_the_answers_are_those_without_drafts(
    start, target, plain, tmp_path, algorithm, shape, least_accepted
):
    """Also of requests that are retracted, aborted, and on a pool that is too small."""
    if algorithm == "EAGLE3":
        model, draft = target, save_eagle3(tmp_path / "draft", target)
    else:
        model = draft = save_mimo(tmp_path / "mimo", target)
    flags = ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft), *shape)
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "15"}
    server = start(model, *FLAGS, *flags, config=CONFIG | {"budget": 1.0}, env=env)
    generate(server, DOCUMENT, 0)
    for _ in range(2):
        found, infos = answers(server)
        assert found == plain
        assert min(info["cached_tokens"] for info in infos[:3]) >= 599  # the pair of the document's last token differs
        assert max(info["spec_accept_length"] for info in infos) > least_accepted
    run_jobs(server, random_jobs(40, seed=2, vocab_size=VOCAB_SIZE), concurrency=12)
    assert "#retracted_reqs" in server.log()
    assert assert_all_slots_are_back(server)["compressions"] > 1
    server.stop(grace_s=0)


def test_compressed_prefixes_are_found_and_outlive_their_server(start, target, tmp_path):
    """Passes read the text as it is, its last token included; chains and trees over what is stored answer alike."""
    draft = save_eagle(tmp_path / "draft", target)
    flags = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(draft))
    found = []
    for shape in (CHAINS, TREES):
        server = start(target, *FLAGS, *flags, *shape, config={"store": str(tmp_path / "store")})
        if shape is CHAINS:
            compress(server)
        results = [generate(server, prompt, NEW_TOKENS) for prompt in PROMPTS[:3]]
        assert min(result["meta_info"]["cached_tokens"] for result in results) >= 567
        found.append([result["output_ids"] for result in results])
        state = assert_all_slots_are_back(server)
        assert 100 <= state["span_slots"] <= 130 and (state["loaded_segments"] > 0) == (shape is TREES)
        assert state["speculation"]["compressed"]["acceptance_length"] > 1.3
        server.stop(grace_s=0)
    assert found[0] == found[1]


def compress(server):
    """Have the document read by passes, compressed and stored."""
    generate(server, DOCUMENT, 0)
    wait_until(lambda: idle_state(server)["stored_segments"] > 0)
    assert idle_state(server)["scoring_passes"] > 0
