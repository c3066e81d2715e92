"""What a session's newer prompts have left is dropped before anything else, and nothing of others is."""

from __future__ import annotations

import gc
from weakref import WeakSet

import pytest

from helpers.harness import Harness, PseudoRandomPolicy, publish_server_args
from sgl_kvevict.cache import sessions as sessions_module

TOOLS = list(range(100, 120))
LEFT, NEW, OTHER = ([base + i for i in range(30)] for base in (200, 300, 400))


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    publish_server_args(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def harness():
    """Prefixes shrink when slots are short, not before; what is dropped is copied to the host."""
    policy = PseudoRandomPolicy(needs_passes=True)
    return Harness(num_slots=400, policy=policy, scores_any_range=True, host_blocks=60)


def ask(harness, tokens, session=None, namespace=None) -> int:
    """Run a request to its end; return how much of its prompt it found."""
    req = harness.request(tokens, namespace)
    req.session_id = session
    assert harness.admit(req)
    found = req.prefix_len
    assert harness.prefill(req)
    harness.finish(req)
    return found


def superseded(harness) -> int:
    """Tokens that are superseded."""
    return sum(len(node.key) for node in harness.tree.prefixes.table.superseded)


def known(harness, tokens) -> int:
    """How much of a prompt the tree has, without asking for it."""
    rest, nodes, count = tokens, list(harness.tree.root_node.children.values()), 0
    while match := [node for node in nodes if rest and node.key.token_ids[0] == rest[0]]:
        (node,) = match
        shared = next((i for i, (a, b) in enumerate(zip(node.key.token_ids, rest, strict=False)) if a != b), None)
        step = min(len(node.key), len(rest)) if shared is None else shared
        count += step
        if step < len(node.key):
            break
        rest, nodes = rest[step:], list(node.children.values())
    return count


def test_what_a_newer_prompt_has_left_goes_first_and_not_to_the_host(harness):
    ask(harness, [*TOOLS, *OTHER], "other")  # the least recently used
    ask(harness, [*TOOLS, *LEFT], "session")
    assert superseded(harness) == 0
    ask(harness, [*TOOLS, *NEW], "session")
    assert superseded(harness) == len(LEFT)
    harness.evict(1)
    assert known(harness, [*TOOLS, *LEFT]) < len(TOOLS) + len(LEFT)
    while superseded(harness):
        harness.evict(1)
    assert known(harness, [*TOOLS, *LEFT]) == len(TOOLS)
    assert ask(harness, [*TOOLS, *OTHER, 1]) == len(TOOLS) + len(OTHER)
    assert ask(harness, [*TOOLS, *NEW, 1]) == len(TOOLS) + len(NEW)
    totals = harness.tree.prefixes.listener.totals
    assert totals.moved_out_segments == totals.squeezes == totals.compressions == 0


def test_without_sessions_nothing_is_superseded(harness):
    for end in (LEFT, NEW, OTHER):
        ask(harness, [*TOOLS, *end])
    assert superseded(harness) == 0


@pytest.mark.parametrize("reader", ["another", None])
def test_what_others_have_read_is_not(harness, reader):
    ask(harness, [*TOOLS, *LEFT], "session")
    ask(harness, [*TOOLS, *LEFT, 1, 2], reader)
    ask(harness, [*TOOLS, *NEW], "session")
    assert superseded(harness) == 0


def test_the_part_that_others_have_read_is_not(harness):
    ask(harness, [*TOOLS, *LEFT], "session")
    ask(harness, [*TOOLS, *LEFT[:12], 1, 2], "another")
    ask(harness, [*TOOLS, *NEW], "session")
    assert superseded(harness) == len(LEFT) - 12


def test_somebody_who_asks_for_it_later_keeps_it(harness):
    ask(harness, [*TOOLS, *LEFT], "session")
    ask(harness, [*TOOLS, *NEW], "session")
    ask(harness, [*TOOLS, *LEFT[:12], 1, 2], "another")
    assert superseded(harness) == len(LEFT) - 12
    ask(harness, [*TOOLS, *LEFT, 1, 2])
    assert superseded(harness) == 0


def test_the_same_id_in_another_namespace_is_another_session(harness):
    ask(harness, [*TOOLS, *LEFT], "session", "tenant")
    ask(harness, [*TOOLS, *NEW], "session")
    ask(harness, [*TOOLS, *NEW], "session", "other tenant")
    assert superseded(harness) == 0


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_session_that_comes_back_supersedes_nothing_more(harness, is_dropped):
    ask(harness, [*TOOLS, *LEFT], "session")
    ask(harness, [*TOOLS, *NEW], "session")
    while is_dropped and superseded(harness):
        harness.evict(1)
    ask(harness, [*TOOLS, *LEFT, 1], "session")
    assert superseded(harness) == 0
    ask(harness, [*TOOLS, *OTHER], "session")
    assert superseded(harness) == 0


def test_turns_that_go_on_leave_nothing_but_answers_that_are_not_repeated(harness):
    prompt = [*TOOLS, *LEFT]
    for turn in range(4):
        req = harness.request(prompt)
        req.session_id = "session"
        assert harness.admit(req) and harness.prefill(req)
        for _ in range(3):
            harness.decode(req)
        answer = list(req.output_ids)
        harness.finish(req)
        prompt = [*prompt, *answer, 7, turn] if turn % 2 else [*prompt, 8, turn]
    assert 0 < superseded(harness) <= 2 * 3


def test_a_branch_that_is_read_waits_for_its_reader(harness):
    req = harness.request([*TOOLS, *LEFT])
    req.session_id = "session"
    assert harness.admit(req) and harness.prefill(req)
    ask(harness, [*TOOLS, *NEW], "session")
    harness.evict(harness.num_slots)
    assert known(harness, [*TOOLS, *LEFT]) == len(TOOLS) + len(LEFT)
    harness.finish(req)  # it has come back, so to say: both go on under one id
    assert superseded(harness) == 0


def test_sessions_are_bounded(harness, monkeypatch):
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 3)
    for number in range(6):
        ask(harness, [*TOOLS, 500 + number], f"session {number}")
    ask(harness, [*TOOLS, *NEW], "session 0")  # forgotten
    assert superseded(harness) == 0
    ask(harness, [*TOOLS, *NEW, 1], "session 5")
    assert superseded(harness) == 1
    harness.flush()
    assert superseded(harness) == 0
    ask(harness, [*TOOLS, *LEFT], "session 5")
    assert superseded(harness) == 0


def test_long_names_of_sessions_are_not_kept(harness):
    """A client chooses ids and namespaces: what the server remembers of each session has a fixed size."""
    ask(harness, [*TOOLS, *LEFT], "s" * 100_000, namespace="n" * 100_000)
    (key,) = harness.tree.prefixes.sessions._sessions
    assert len(key) == 32


@pytest.mark.parametrize("second", ["session", "another"])
def test_a_session_keeps_nothing_of_what_was_dropped(harness, second):
    """Neither tokens nor tensors: thousands of sessions are remembered for long after their prompts were dropped."""
    ask(harness, [*TOOLS, *LEFT], "session")
    ask(harness, [*TOOLS, *LEFT, 1, 2], second)  # if this is another one, the nodes are those of several sessions
    nodes = WeakSet(harness.tree.nodes())
    while harness.evict(1):
        pass
    gc.collect()
    assert len(harness.tree.prefixes.sessions._sessions) == len({"session", second}) and not len(nodes)


def test_what_is_left_of_a_prompt_whose_end_was_dropped_is_superseded(harness):
    ask(harness, [*TOOLS, *LEFT], "session")
    ask(harness, [*TOOLS, *LEFT[:12], 1, 2], "session")
    while known(harness, [*TOOLS, *LEFT[:12], 1]) > len(TOOLS) + 12:  # the end of its newest prompt
        harness.evict(1)
    assert known(harness, [*TOOLS, *LEFT]) == len(TOOLS) + 12
    ask(harness, [*TOOLS, *NEW], "session")
    assert superseded(harness) == 12


def test_sessions_are_told_apart_by_namespace_and_id():
    names = [
        ((None, None), "a"),
        ((None, "a"), ""),
        (("a", None), ""),
        ((None, None), "None"),
        (("\ud800", None), "\0"),
    ]
    assert len({sessions_module.session_key(namespace, name) for namespace, name in names}) == len(names)
