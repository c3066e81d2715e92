"""When passes may start, and what of users' time they take."""

from __future__ import annotations

import random

import pytest

from helpers.documents import make_harness, ranges
from helpers.passes import Letters, MiniScheduler
from sgl_kvevict.cache.pacing import BUSY_TOKENS, MAX_QUIET_S, QUIET_S, REQUESTS_PER_DELAY, Pacing
from sgl_kvevict.cache.probes import REPEAT

SHARE = 0.005
"""The default of ``pass_share``."""
TURN_S = 1 / 64
"""Seconds of a turn, or of a step of the model; exact in binary."""
SECONDS_PER_TOKEN = 1 / 128
"""Of a pass: 128 tokens take a second, as on a CPU."""


class Server:
    """Turns of a scheduler on a clock of its own, with prefixes that always want passes.

    Attributes:
        passes: tokens of the passes that ran.
    """

    def __init__(self, share: float = SHARE, longest: int = 512) -> None:
        self.pacing = Pacing(share, longest)
        self.now = 0.0
        self.passes: list[int] = []
        self._is_running = False

    def turn(self, has_users: bool, seconds: float = TURN_S) -> float:
        """One turn, with a pass if one may start; return the seconds that the pass took."""
        num_tokens = self.pacing.turn(self.now, has_users=has_users, has_pass=False)
        took = num_tokens * SECONDS_PER_TOKEN
        if num_tokens:
            self.pacing.started(num_tokens)
            self.passes.append(num_tokens)
        self.now += took + seconds
        return took

    def request(self, seconds: float) -> float:
        """A request that arrives now and runs alone; return how long it took."""
        began = self.now
        for _ in range(int(seconds / TURN_S)):
            self.turn(has_users=True)
        return self.now - began

    def pause(self, seconds: float) -> float:
        """Nobody for so long; return how much later than that the next request is seen, because a pass ran."""
        end = self.now + seconds
        while self.now < end:
            self.turn(has_users=False)
        return self.now - end


def slowdowns(server: Server, request_s: float, pause_s: float, count: int) -> list[float]:
    """What requests of one client took, waiting for a pass included, to what they take without passes."""
    found = []
    server.request(request_s)
    for _ in range(count):
        late = server.pause(pause_s)
        found.append((late + server.request(request_s)) / request_s)
    return found


def at(shares: list[float], share: float) -> float:
    """A quantile, from above."""
    return sorted(shares)[int(share * len(shares))]


@pytest.mark.parametrize("pause_s", [0.0, 0.3, 1.0, 2.0, 2.4, 3.0, 5.0, 8.0, 30.0])
@pytest.mark.parametrize("request_s", [0.1875, 1.0, 4.0, 20.0])
def test_a_clients_requests_take_as_long_as_without_passes(request_s, pause_s):
    """Median and 95 %, whatever the rhythm; 1,000 requests show the long run."""
    server = Server()
    found = slowdowns(server, request_s, pause_s, 1000)
    assert at(found, 0.5) <= 1.1 and at(found, 0.95) <= 1.1
    assert server.passes, "passes are rare, but not absent"


@pytest.mark.parametrize("pause_s", [0.0, 0.25, 1.0, 2.0])
def test_no_request_within_two_seconds_meets_a_pass_that_was_not_beside_users(pause_s):
    """The first hundred requests of a server: less than 20 s with users, so there is no pass at all."""
    server = Server()
    assert slowdowns(server, 0.125, pause_s, 100) == [pytest.approx(1, abs=TURN_S / 0.125)] * 100
    assert server.passes == []


def test_who_comes_at_random_seldom_meets_a_pass():
    server, rng = Server(), random.Random(5)
    delayed = 0
    for _ in range(3000):
        delayed += server.pause(rng.expovariate(1 / 6)) > 2 * TURN_S
        server.request(0.25)
    assert 0 < delayed / 3000 <= 1.5 / REQUESTS_PER_DELAY


def test_on_an_idle_server_passes_follow_each_other_and_grow():
    server = Server()
    server.request(1.0)
    server.pause(QUIET_S - 4 * TURN_S)
    assert server.passes == []
    server.pause(20.0)
    assert server.passes[:5] == [128, 256, 512, 512, 512]


def test_users_who_come_and_go_while_no_pass_waits_are_noticed():
    """Nothing waited for a pass between two idle times; the second one begins with a short one all the same."""
    server = Server()
    server.request(0.25)
    server.pause(20.0)
    server.passes.clear()
    for has_users in (True, True, False):
        server.pacing.turn(server.now, has_users=has_users, has_pass=False)
        server.now += TURN_S
    server.pause(1.0)
    assert server.passes == []
    server.pause(server.pacing.quiet_s - 0.5)
    assert server.passes == [128]


def test_who_meets_a_pass_doubles_the_quiet_time_and_others_shorten_it():
    pacing, now = Pacing(SHARE, 512), 100.0
    for expected in (2 * QUIET_S, 4 * QUIET_S):
        pacing.turn(now, has_users=True, has_pass=False)
        pacing.turn(now, has_users=False, has_pass=False)
        now += 100
        pacing.started(pacing.turn(now, has_users=False, has_pass=False))
        pacing.turn(now + 1, has_users=True, has_pass=True)
        pacing.turn(now + 2, has_users=False, has_pass=False)
        assert pacing.quiet_s == pytest.approx(expected, rel=0.05)
    for _ in range(3 * REQUESTS_PER_DELAY):
        pacing.turn(now + 3, has_users=True, has_pass=False)
        pacing.turn(now + 3, has_users=False, has_pass=False)
    assert pacing.quiet_s == QUIET_S


def test_the_quiet_time_is_bounded():
    pacing, now = Pacing(SHARE, 512), 0.0
    for _ in range(20):
        now += 2 * MAX_QUIET_S
        pacing.started(pacing.turn(now, has_users=False, has_pass=False))
        pacing.turn(now + 1, has_users=True, has_pass=True)
        pacing.turn(now + 2, has_users=False, has_pass=False)
    assert pacing.quiet_s == MAX_QUIET_S


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.01])
def test_beside_users_passes_take_their_share_of_the_time(share):
    server = Server(share)
    while len(server.passes) < 100:
        server.turn(has_users=True)
    took = sum(server.passes) * SECONDS_PER_TOKEN
    assert set(server.passes) == {BUSY_TOKENS}
    assert share / 1.3 < took / server.now <= share * (1 + 1 / 90)


def test_long_passes_of_an_idle_server_do_not_delay_those_beside_users():
    """A pass beside users has 128 tokens, so the last idle one counts with as many."""
    pauses = []
    for idle_s in (3.2, 60.0):
        server = Server(0.2)
        server.request(0.25)
        server.pause(idle_s)
        server.passes.clear()
        began = server.now
        while not server.passes:
            server.turn(has_users=True)
        pauses.append(server.now - began)
    assert pauses[0] == pytest.approx(pauses[1], rel=0.1)


def test_a_withdrawn_pass_says_nothing_of_the_next():
    pacing = Pacing(0.1, 512)
    pacing.started(pacing.turn(0.0, has_users=False, has_pass=False))
    pacing.withdrawn()
    pacing.turn(500.0, has_users=True, has_pass=False)
    assert pacing.turn(501.0, has_users=True, has_pass=False) == BUSY_TOKENS


def test_a_prefix_is_scored_while_users_never_leave():
    """Its passes come some seconds apart, and their number of tokens is right."""
    harness = make_harness(700, needs_passes=True, scoring_pass_tokens=512, pass_share=0.25)
    harness.finish(harness.run([number % 251 for number in range(302)], options={"warm": True}))
    scheduler = MiniScheduler(harness)
    scheduler.running_batch.reqs = [harness.request([1, 2, 3])]
    ran = [scheduler.run_pass() for _ in range(20)]
    # The first after 0.3 s, for the second it is assumed to have taken a turn, which is 3 turns of users.
    assert [step for step, did in enumerate(ran) if did] == [5, 9, 13]
    lead = len(Letters().encode(REPEAT + "\n\n", False))
    assert [len(req.origin_input_ids) - 302 - lead for req in scheduler.passes] == [128, 128, 46]
    assert ranges(harness) == [(0, 300)]
