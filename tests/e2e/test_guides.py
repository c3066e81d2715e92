"""The code of docs/guides.md, as its readers run it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from helpers.traffic import assert_all_slots_are_back

ROOT = Path(__file__).resolve().parents[2]
HANDBOOK = ROOT / "examples" / "data" / "station_handbook.txt"
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "guides.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
GUIDES = {text.splitlines()[0]: re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) for text in SECTIONS[1:]}


@pytest.fixture(scope="module")
def server(start, demo_model):
    return start(demo_model, "--max-total-tokens", "4000", "--enable-cache-report", config={"host_bytes": 0})


@pytest.fixture
def ran(server, request, tmp_path, monkeypatch) -> dict[str, Any]:
    """The names that the code of the test's parameter has left; afterwards the server has lost no slot."""
    (tmp_path / "handbook.txt").write_text(HANDBOOK.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (code,) = GUIDES[request.param]
    assert code.count("http://127.0.0.1:30000") == 1
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(code.replace("http://127.0.0.1:30000", server.url), "docs/guides.md", "exec"), names)
    yield names
    assert_all_slots_are_back(server)


@pytest.mark.parametrize("ran", ["A service that answers from documents"], indirect=True)
def test_documents(ran):
    assert ran["had"].device < 100
    assert "Grey Heron" in ran["text"]
    report = ran["report"]
    assert report.compressed.num_tokens > 2700 and 0.3 < report.compressed.share < 1 and report.computed_again == 0
    exact = ran["ask"]("handbook", "What is the name of the supply boat?", exact=True)[1]
    assert exact.compressed.num_tokens == 0 and exact.computed_again > 2700


@pytest.mark.parametrize("ran", ["Agents"], indirect=True)
def test_agents(ran):
    assert ran["first"].compressed.num_tokens > 256 and ran["second"].device > ran["first"].device
    assert ran["second"].compressed.num_tokens >= ran["first"].compressed.num_tokens
    assert [turn["role"] for turn in ran["history"]] == ["user", "assistant"] * 2


@pytest.mark.parametrize("ran", ["Chat"], indirect=True)
def test_chat(ran):
    assert [turn["role"] for turn in ran["messages"]] == ["system"] + ["user", "assistant"] * 2
    assert all(turn["content"] for turn in ran["messages"])
