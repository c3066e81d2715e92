"""The policy of the documentation: it works as shown, and the documentation shows this very file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.decisions import decide
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import LayerView, QueryWindow, Signal, build_policy
from sgl_kvevict.policies.scorers import WindowAttentionScorer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "policies" / "value_aware.py"
DOCUMENT = ROOT / "docs" / "policies.md"
PATH = "value_aware:value_aware"
NUM_TOKENS = 40


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))


@pytest.fixture
def view() -> LayerView:
    """One layer of 3 KV heads; the window is the tail behind the range."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, NUM_TOKENS + 1, 3, 8, generator=generator)
    window = QueryWindow(torch.randn(8, 6, 8, generator=generator), torch.full((8, 6), 3.0), NUM_TOKENS)
    return LayerView(0, 0, k, v, torch.arange(1, NUM_TOKENS + 1), 8**-0.5, {Signal.WINDOW_QUERIES: window})


def test_documentation_shows_exactly_the_file() -> None:
    shown = re.search(r"<!-- example: (\S+) -->\n```python\n(.*?)```\n", DOCUMENT.read_text(), re.DOTALL)
    assert shown is not None and ROOT / shown[1] == EXAMPLE
    assert shown[2] == EXAMPLE.read_text()


def test_it_keeps_what_attention_times_value_says(view: LayerView) -> None:
    policy = build_policy(PATH, {"window_size": 8})
    assert policy is not None and policy.name == "value-aware" and policy.scorer.window_size == 8
    assert policy.needs == {Signal.WINDOW_QUERIES, Signal.KEYS, Signal.VALUES}
    scores = policy.scorer.score(view).values
    attention = WindowAttentionScorer(8).score(view).values
    torch.testing.assert_close(scores, attention * view.values.norm(dim=-1).T)
    decision = decide(policy, lambda _: view, KVGeometry(1, 6, 3, 8, NUM_TOKENS + 1), 30, 2)
    assert decision.selection.keep_lens.sum() == 30
    for run in decision.selection.indices.split(decision.selection.keep_lens[0].tolist()):
        assert run[:2].tolist() == [0, 1]


def test_its_factorys_arguments_are_the_options() -> None:
    with pytest.raises(ConfigError, match=f"unexpected keyword argument 'windw_size' in policy '{PATH}'"):
        build_policy(PATH, {"windw_size": 8})


def test_tables_of_the_documentation_are_what_the_command_writes() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "policies" / "write_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
