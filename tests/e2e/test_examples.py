"""Every example, as its readers run it: one server for those that need one, all its accounts in order at the end."""

from __future__ import annotations

import importlib.util
import io
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from helpers.traffic import assert_all_slots_are_back

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
POOL = 4000
FLAGS = ("--max-total-tokens", str(POOL), "--enable-cache-report", "--enable-metrics")
HANDBOOK_TOKENS = 2800


@pytest.fixture(scope="module")
def server(start, demo_model):
    return start(demo_model, *FLAGS, config={})


@pytest.fixture
def printed(server, request):
    """What the example of the test's parameter prints; afterwards the server has lost no slot and held no error."""
    yield run_example(request.param, server.url)
    assert_all_slots_are_back(server)


def run_example(name: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def from_cache(lines: list[str]) -> list[tuple[int, int]]:
    """(tokens found in the cache, tokens of the prompt or 0) of every line that tells them."""
    found = (re.search(r"([\d,]+)(?: of ([\d,]+))? tokens from the cache\]$", line) for line in lines)
    return [(number(match[1]), number(match[2] or "0")) for match in found if match]


def number(text: str) -> int:
    return int(text.replace(",", ""))


def assert_compressed(line: str, at_least: float) -> int:
    """Check that at least so many tokens are compressed, to about the budget of a fifth; return how many."""
    match = re.fullmatch(r"compressed prefixes: ([\d,]+) tokens in ([\d,]+) token slots", line)
    assert match is not None, line
    tokens, slots = number(match[1]), number(match[2])
    assert tokens >= at_least and slots <= 0.25 * tokens
    return tokens


def test_demo(server, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "demo"))
    spec = importlib.util.spec_from_file_location("demo_run", EXAMPLES / "demo" / "run.py")
    demo = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, demo)  # its dataclasses look their module up
    spec.loader.exec_module(demo)
    shown = io.StringIO()
    figures = demo.run(server, Console(file=shown, width=120), 0.2, POOL)
    (whole, fifth, least), complete = figures["dial"], figures["complete"]
    assert whole["slots"] == figures["prefix_tokens"] and (whole["share_of_entries"], whole["bits"]) == (1, 16)
    assert [round(each["slots"] / figures["prefix_tokens"], 3) for each in (fifth, least)] == [0.2, 0.05]
    right = [each["right_answers"] for each in (whole, fifth, complete)]
    assert [*right, figures["answers"], figures["sharers"]] == [8] * 5
    assert 0 <= least["right_answers"] <= 8 and least["share_of_entries"] < fifth["share_of_entries"] < 1
    assert (complete["share"], complete["share_of_entries"]) == (None, 1)
    assert least["slots"] < fifth["slots"] < complete["slots"] < 0.26 * figures["prefix_tokens"]
    columns = [*figures["dial"], complete]
    assert [each["cached_tokens"] for each in columns] == [8 * figures["prefix_tokens"]] * 4
    assert figures["pressing_answer_is_right"] and figures["pressing_tokens"] < figures["pool_slots"] == POOL
    assert figures["pool_leaks"] == 0
    assert shown.getvalue().count("Tomas Brandt") >= 2 and "8 of 8" in shown.getvalue()
    server.post("/flush_cache?timeout=60")  # the others count what they compress themselves


@pytest.mark.parametrize("printed", ["fork.py"], indirect=True)
def test_fork(printed):
    cached, compressed = printed.index("Just cached:"), printed.index("Compressed:")
    for answers in (printed[cached + 1 : compressed - 1], printed[compressed + 1 : -1]):
        assert len(answers) == 6 == len(from_cache(answers))
        assert all(found >= HANDBOOK_TOKENS for found, _ in from_cache(answers))
        for fact, line in zip(
            ("Tomas Brandt", "western slope", "come inside", "Balthasar", "flagpole", "pancakes"), answers, strict=True
        ):
            assert fact in line
    assert_compressed(printed[-1], 0.98 * HANDBOOK_TOKENS)


@pytest.mark.parametrize("printed", ["judge.py"], indirect=True)
def test_judge(printed):
    verdicts = [re.search(r"\.\.\. (.*?)  \[", line)[1] for line in printed[:-1]]
    assert verdicts == ["Grey Heron", "Lantern Nine", "Clover", "Balthasar", "flagpole"]
    assert_compressed(printed[-1], 0.98 * HANDBOOK_TOKENS)


@pytest.mark.parametrize("printed", ["chat.py"], indirect=True)
def test_chat(printed):
    usage = from_cache(printed)
    assert len(usage) == 5 and usage[0][0] >= HANDBOOK_TOKENS
    assert all(found >= before for (_, before), (found, _) in pairwise(usage))  # all of the turn before was found
    text = "\n".join(printed)
    assert [fact in text for fact in ("Grey Heron", "Lantern Nine", "rosemary", "iron chest")] == [True] * 4
    assert_compressed(printed[-1], 0.98 * HANDBOOK_TOKENS)


@pytest.mark.parametrize("printed", ["rag.py"], indirect=True)
def test_rag(printed):
    assert [bool(re.search(r"compressed after [\d.]+ s$", line)) for line in printed[:3]] == [True] * 3
    for fact, line in zip(("western slope", "Annika", "flagpole", "chest"), printed[3:-1], strict=True):
        assert fact in line
    assert_compressed(printed[-1], 0.9 * HANDBOOK_TOKENS)


@pytest.mark.parametrize("printed", ["agents.py"], indirect=True)
def test_agents(printed):
    assert re.fullmatch(r"system prompt: compressed; [\d,]+ tokens were in the pool before", printed[0])
    steps = printed[1:-1]
    assert [line.split(":")[0] for line in steps] == [
        f"{agent}, step {number}" for agent in ("harbour", "radio", "kitchen") for number in (1, 2)
    ]
    for first, second in zip(from_cache(steps[::2]), from_cache(steps[1::2]), strict=True):
        assert first[0] >= HANDBOOK_TOKENS and first[1] <= second[0]  # an agent's history was found, too
    assert [
        fact in line for fact, line in zip(("Grey Heron", "Lantern Nine", "rosemary"), steps[::2], strict=True)
    ] == [True] * 3
    assert_compressed(printed[-1], 0.98 * HANDBOOK_TOKENS)


@pytest.mark.parametrize("printed", ["langchain_chain.py"], indirect=True)
def test_langchain(printed):
    assert len(from_cache(printed[:-1])) == 4
    assert all(found >= HANDBOOK_TOKENS for found, _ in from_cache(printed[:-1]))
    for fact, line in zip(("Grey Heron", "Lantern Nine", "rosemary", "iron chest"), printed[:-1], strict=True):
        assert fact in line
    assert_compressed(printed[-1], 0.98 * HANDBOOK_TOKENS)


def test_engine(demo_model):
    first, *answers = run_example("engine.py", str(demo_model))
    compressed = assert_compressed(first, 700)
    assert len(from_cache(answers)) == 3
    assert all(found >= compressed for found, _ in from_cache(answers))  # all of the document, not only a part
    assert "spring" in answers[0] and "Grey Heron" in answers[1] and "flagpole" in answers[2]
