"""``n > 1``: SGLang first sends a request of no token, so that the samples find their prompt in the cache."""

from __future__ import annotations

from helpers.documents import document, make_harness, ranges
from helpers.pseudo_random_policy import PseudoRandomPolicy
from sgl_kvevict.policies.signals import Signal

DOCUMENT = document(0, 40)


def ask(harness, *, n=3, num_new=8, is_exact=False):
    req = harness.request(DOCUMENT)
    harness.tree.prefixes.readers[req].is_exact = is_exact
    req.sampling_params.n, req.sampling_params.max_new_tokens = n, num_new
    return req


def run(harness, req):
    """Prefill a prompt; return how many tokens it found."""
    assert harness.admit(req)
    found = req.prefix_len
    harness.prefill(req)
    return found


def test_a_prompt_is_compressed_with_its_first_sample_and_counted_once():
    harness = make_harness()
    assert run(harness, ask(harness, num_new=0)) == 0 and not ranges(harness)
    samples = [ask(harness) for _ in range(3)]
    assert all(map(harness.admit, samples))
    assert [req.prefix_len for req in samples] == [39] * 3  # SGLang computes the last token
    for req in samples:
        harness.prefill(req)
    assert ranges(harness) == [(0, 38)]
    for req in samples:
        harness.decode(req)
        harness.finish(req)
    totals = harness.tree.prefixes.totals
    assert (totals.prompts, totals.prompt_tokens, totals.found_tokens) == (1, 40, 0)


def test_exact_samples_share_one_uncompressed_prefix_while_they_run():
    harness, samples = make_harness(), []
    assert run(harness, ask(harness, num_new=0, is_exact=True)) == 0
    for _ in range(3):  # one after the other, as they come
        samples.append(ask(harness, is_exact=True))
        assert run(harness, samples[-1]) == 39
        harness.decode(samples[-1])
    for req in samples:
        assert not ranges(harness)
        harness.finish(req)
    assert ranges(harness) == [(0, 38)]


def test_a_prompt_without_samples_is_compressed_when_it_is_complete():
    harness = make_harness()
    run(harness, ask(harness, n=1, num_new=0))
    assert ranges(harness) == [(0, 38)]


def test_samples_are_ranked_by_what_the_prompt_has_left_not_by_their_own_last_query(monkeypatch):
    policy = PseudoRandomPolicy(needs=frozenset({Signal.WINDOW_QUERIES}), window_size=4)
    harness, ranked = make_harness(options={"policy": policy}), []
    rank = type(harness.tree.compressor).rank
    monkeypatch.setattr(
        type(harness.tree.compressor),
        "rank",
        lambda self, slots, start, observation, turn: (
            ranked.append(observation.first_query) or rank(self, slots, start, observation, turn)
        ),
    )
    run(harness, ask(harness, num_new=0))
    run(harness, ask(harness))
    assert ranges(harness) == [(0, 38)] and ranked == [0]
