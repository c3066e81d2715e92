"""What share of a server's steps passes may take."""

from __future__ import annotations

import itertools
import random

import pytest

from helpers.fake_tree import FakePasses, FakeTree
from helpers.pseudo_random_policy import PseudoRandomPolicy
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.lifecycle.pacing import BUSY_TOKENS, Pacing

LEAD = 20
"""Tokens that come before those of the prefix."""


def steps_until_allowed(pacing: Pacing, num_users: int) -> tuple[int, int]:
    """Steps that go by first, and tokens of the pass."""
    for steps in range(10_000):
        if num_tokens := pacing.step(num_users):
            return steps, num_tokens
    raise AssertionError("never")


def test_without_users_passes_follow_each_other_and_grow():
    pacing = Pacing(0.1, 512)
    sizes = []
    for _ in range(4):
        steps, num_tokens = steps_until_allowed(pacing, 0)
        assert steps == 0
        pacing.started(num_tokens + LEAD)
        sizes.append(num_tokens)
    assert sizes == [128, 256, 512, 512]


def test_who_comes_makes_them_short_again():
    pacing = Pacing(0.1, 512)
    for _ in range(3):
        pacing.started(steps_until_allowed(pacing, 0)[1])
    steps, num_tokens = steps_until_allowed(pacing, 1)
    assert steps >= 9 * 512 / BUSY_TOKENS and num_tokens == BUSY_TOKENS
    pacing.started(num_tokens)
    assert steps_until_allowed(pacing, 0) == (0, 2 * BUSY_TOKENS)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.01])
def test_beside_users_passes_take_their_share_of_the_steps(share):
    pacing, rng = Pacing(share, 512), random.Random(1)
    steps = passes = 0
    while passes < 100:
        if num_tokens := pacing.step(rng.randrange(1, 9)):
            pacing.started(num_tokens)
            passes += 1
        steps += 1
    assert share / 2 < passes / steps <= share + 1 / steps


def test_who_comes_to_an_idle_server_has_the_first_steps_to_itself():
    pacing = Pacing(0.1, 512)
    assert pacing.step(0) == BUSY_TOKENS
    assert steps_until_allowed(pacing, 1) == (9, BUSY_TOKENS)


def test_gaps_between_users_are_no_idle_server():
    """Clients that ask without a pause: nothing starts in a gap that would not start beside them."""
    pacing = Pacing(0.1, 512)
    starts = []
    for step in range(400):
        num_users = 0 if step % 20 < 3 else 4
        if num_tokens := pacing.step(num_users, quiet_turns=5):
            assert num_tokens == BUSY_TOKENS
            pacing.started(num_tokens)
            starts.append(step)
    steps_beside_users = [sum(step % 20 >= 3 for step in range(*each)) for each in itertools.pairwise(starts)]
    assert len(starts) > 20 and min(steps_beside_users) >= 9


def test_a_server_is_idle_after_enough_turns():
    pacing = Pacing(0.1, 512)
    assert [pacing.step(0, quiet_turns=3) for _ in range(5)] == [0, 0, 0, BUSY_TOKENS, BUSY_TOKENS]
    pacing.started(BUSY_TOKENS)
    assert pacing.step(0, quiet_turns=3) == 2 * BUSY_TOKENS  # it stays idle while passes follow each other
    assert pacing.step(1, quiet_turns=3) == 0
    assert [pacing.step(0, quiet_turns=3) for _ in range(4)] == [0, 0, 0, BUSY_TOKENS]


def test_a_long_turn_counts_for_many():
    pacing = Pacing(0.1, 512)
    assert [pacing.step(0, num_turns=4, quiet_turns=10) for _ in range(4)] == [0, 0, 0, BUSY_TOKENS]
    assert pacing.step(1, num_turns=4, quiet_turns=10) == 0
    assert [pacing.step(0, num_turns=10, quiet_turns=10) for _ in range(2)] == [0, BUSY_TOKENS]


def test_prefills_that_running_requests_wait_for_do_not_count():
    pacing = Pacing(0.5, 512)
    pacing.started(BUSY_TOKENS)
    assert [pacing.step(2, is_counted=False) for _ in range(100)] == [0] * 100
    assert steps_until_allowed(pacing, 2) == (1, BUSY_TOKENS)


def test_longer_passes_are_rarer():
    pauses = []
    for num_tokens in (10, BUSY_TOKENS, 4 * BUSY_TOKENS, 16 * BUSY_TOKENS):
        pacing = Pacing(0.2, 512)
        pacing.started(num_tokens)
        pauses.append(steps_until_allowed(pacing, 4)[0])
    assert pauses == [4, 4, 16, 64]


def test_a_prefix_is_scored_while_users_never_leave():
    """Its passes come a few steps apart, and their number of tokens is right."""
    config = KVEvictConfig(budget=0.5, tail_tokens=2, sink_tokens=0, min_prefix_tokens=4, pass_share=0.25)
    tree = FakeTree(PseudoRandomPolicy(needs_passes=True), config)
    passes = FakePasses(tree)
    node = tree.add(302)
    tree.release(tree.prompt(node, warm=True))
    passes.num_users = 4
    ran = [passes.run() for _ in range(20)]
    assert [step for step, did in enumerate(ran) if did] == [3, 7, 11]
    assert [len(probe) for _, probe in passes.started] == [128, 128, 46]
    assert sum(len(probe) for _, probe in passes.started) == 302
    assert len(tree.manager.spans) == 1
