"""Draft models that read the target's hidden states: keys of the tree are pairs of tokens, answers are the same."""

from __future__ import annotations

import pytest

from helpers import overlapped_drafts, traffic
from helpers.draft_models import CHAINS, TREES, greedy, save_eagle, save_eagle3, save_mimo, save_target
from helpers.event_sockets import wait_until
from helpers.tiny_model import VOCAB_SIZE
from helpers.traffic import assert_all_slots_are_back, generate, idle_state, numbers, random_jobs, run_jobs
from kvevict_tools.launcher import FLOAT32_FLAGS

FLAGS = (*FLOAT32_FLAGS, "--max-total-tokens", "3000", "--context-length", "1024")
CONFIG = {"policy": "ada-snapkv", "min_prefix_tokens": 48, "tail_tokens": 16, "policy_options": {"window_size": 16}}
NEW_TOKENS = 40


DOCUMENT = numbers(0, 600)
PROMPTS = [DOCUMENT + numbers(seed, 7) for seed in range(1, 4)] + [DOCUMENT[:300] + numbers(4, 7), numbers(6, 30)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plain(target):
    """Answers without speculation."""
    return [greedy(target, prompt, NEW_TOKENS)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("algorithm", "flags", "least_accepted"),
    [("EAGLE3", (*TREES, "--tp-size", "2"), 1.15), ("EAGLE", CHAINS, 1.3)],
    ids=["eagle3", "eagle"],
)
def test_all_is_kept_and_the_answers_are_those_without_drafts(
    start, target, plain, tmp_path, algorithm, flags, least_accepted
):
    """Also of requests that are retracted, aborted, and on a pool that is too small; EAGLE3 on two ranks."""
    draft = {"EAGLE3": save_eagle3, "EAGLE": save_eagle}[algorithm](tmp_path / "draft", target)
    flags = ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft), *flags)
    patch = overlapped_drafts.__name__ if algorithm == "EAGLE3" else None
    server = start(target, *FLAGS, *flags, config=CONFIG | {"budget": 1.0}, env=traffic.RETRACTIONS, patch=patch)
    generate(server, DOCUMENT, 0)
    for _ in range(2):
        found, infos = traffic.answers(server, PROMPTS, NEW_TOKENS)
        assert found == plain
        assert min(info["cached_tokens"] for info in infos[:3]) >= 599  # the pair of the document's last token differs
        assert max(info["spec_accept_length"] for info in infos) > least_accepted
    run_jobs(server, random_jobs(40, seed=2, vocab_size=VOCAB_SIZE), concurrency=12)
    assert "#retracted_reqs" in server.log()
    assert assert_all_slots_are_back(server)["compressions"] > 1
    server.stop(grace_s=0)


def test_compressed_prefixes_are_found_and_outlive_their_server(start, target, tmp_path):
    """What is stored has the rows of the draft model, too."""
    model = save_mimo(tmp_path / "mimo", target)
    flags = ("--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", str(model), *TREES)
    found = []
    for patch in (None, overlapped_drafts.__name__):
        server = start(model, *FLAGS, *flags, config={"store": str(tmp_path / "store")}, patch=patch)
        if patch is None:
            compress(server)
        results = [generate(server, prompt, NEW_TOKENS) for prompt in PROMPTS[:3]]
        assert min(result["meta_info"]["cached_tokens"] for result in results) >= 567
        found.append([(result["output_ids"], result["meta_info"]["spec_accept_length"]) for result in results])
        state = assert_all_slots_are_back(server)
        assert 100 <= state["span_slots"] <= 130 and (state["loaded_segments"] > 0) == (patch is not None)
        assert min(result["meta_info"]["spec_accept_length"] for result in results) > 1
        if patch is None:
            server.stop(grace_s=0)
    assert found[0] == found[1]
    exact_answers(server, target)
    server.stop(grace_s=0)


def compress(server):
    """Have the document compressed and stored."""
    generate(server, DOCUMENT, 0)
    wait_until(lambda: idle_state(server)["stored_segments"] > 0)


def exact_answers(server, target):
    """Answers and log-probabilities of requests that read nothing compressed are those of the whole model."""
    tokens, logprobs = greedy(target, PROMPTS[0], NEW_TOKENS)
    answer = generate(server, PROMPTS[0], NEW_TOKENS, {"kvevict": {"exact": True}}, return_logprob=True)
    entries = answer["meta_info"]["output_token_logprobs"]
    assert answer["output_ids"] == [token for _, token, _ in entries] == tokens
    assert [value for value, _, _ in entries] == pytest.approx(logprobs, abs=2e-3)
    assert_all_slots_are_back(server)
