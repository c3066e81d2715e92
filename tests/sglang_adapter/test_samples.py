"""``n > 1``: SGLang first sends a request of no token, so that the samples find their prompt in the cache."""

from __future__ import annotations

from helpers.documents import document, make_harness, ranges
from helpers.pseudo_random_policy import PseudoRandomPolicy
from sgl_kvevict.policies.signals import Signal

DOCUMENT = document(0, 40)
COMPRESSED = [(0, 39), (39, 40)]
"""Spans of the document once a sample has found it: SGLang computes the last token, and cuts the node before it."""


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


def begun(**fields):
    """A cache in which SGLang's request of no token was prefilled, for samples that come later."""
    harness = make_harness(**fields)
    assert run(harness, ask(harness, num_new=0)) == 0 and not ranges(harness)
    return harness


def one_of_three(**fields):
    """The same, and the first sample."""
    harness = begun(**fields)
    sample = ask(harness)
    run(harness, sample)
    assert not ranges(harness)
    return harness, sample


def test_a_prompt_is_compressed_with_its_last_sample_and_counted_once():
    harness, samples = begun(), []
    for _ in range(3):  # one after the other, as they come
        assert not ranges(harness)
        samples.append(ask(harness))
        assert run(harness, samples[-1]) == 39  # SGLang computes the last token
        harness.decode(samples[-1])
    assert ranges(harness) == COMPRESSED
    for req in samples:
        harness.decode(req)
        harness.finish(req)
    totals = harness.tree.prefixes.totals
    assert (totals.prompts, totals.prompt_tokens, totals.found_tokens) == (1, 40, 0)


def test_samples_that_never_come_are_not_awaited_once_their_prompt_is_compressed():
    """Else later turns on the prompt would stay uncompressed, too."""
    harness = begun()
    prefixes, path = harness.tree.prefixes, harness.tree.port.find(DOCUMENT, (None, None))
    assert prefixes.table.is_awaited(path)
    assert prefixes.pressure.reclaim(None) and ranges(harness)
    assert not prefixes.table.is_awaited(harness.tree.port.find(DOCUMENT, (None, None)))


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
    assert ranges(harness) == COMPRESSED


def test_a_prompt_without_samples_is_compressed_when_it_is_complete():
    harness = make_harness()
    run(harness, ask(harness, n=1, num_new=0))
    assert ranges(harness) == [(0, 40)]


def test_samples_are_ranked_by_what_the_prompt_has_left_not_by_their_own_last_query(monkeypatch):
    policy = PseudoRandomPolicy(needs=frozenset({Signal.WINDOW_QUERIES}), window_size=4)
    harness, ranked = make_harness(options={"policy": policy}), []
    rank = type(harness.tree.compressor).rank
    monkeypatch.setattr(
        type(harness.tree.compressor),
        "rank",
        lambda self, slots, start, observation, *rest: (
            ranked.append(observation.first_query) or rank(self, slots, start, observation, *rest)
        ),
    )
    run(harness, ask(harness, num_new=0))
    for _ in range(3):
        run(harness, ask(harness))
    assert ranges(harness) == COMPRESSED and ranked == [0]


def test_two_clients_samples_of_one_prompt_are_counted_together():
    harness = make_harness()
    for _ in range(2):
        run(harness, ask(harness, num_new=0))
    for _ in range(6):
        assert not ranges(harness)
        assert run(harness, ask(harness)) == 39
    assert ranges(harness) == COMPRESSED


def test_samples_that_do_not_come_are_not_waited_for():
    """A client that hangs up aborts those that run; those that SGLang has not admitted are never seen."""
    harness, sample = one_of_three()
    harness.abort(sample)
    assert ranges(harness) == COMPRESSED


def test_a_prompt_that_waits_for_samples_shrinks_when_slots_are_short():
    harness, sample = one_of_three(num_slots=60)
    assert harness.run(document(1, 40)[:30]) is not None
    assert (0, 39) in ranges(harness) and sample in harness.live


def test_a_retracted_sample_is_counted_once():
    harness, first = one_of_three()
    harness.retract(first)
    run(harness, ask(harness))
    assert not ranges(harness)
    run(harness, ask(harness))
    assert ranges(harness) == COMPRESSED


def test_the_node_of_a_prompt_that_waits_may_be_split():
    harness, _ = one_of_three()
    other = harness.run([*DOCUMENT[:39], 7, 8, 9])
    assert other is not None
    for _ in range(2):
        run(harness, ask(harness))
    assert ranges(harness)
