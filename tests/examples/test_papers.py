"""The papers' settings load, and give the sizes that the papers print."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_kvevict.config import parse_config, read_config_file
from sgl_kvevict.policies import build_policy

FOLDER = Path(__file__).parents[2] / "examples" / "papers"
SIZES = {
    "ada-kv": (16_384, 3277),
    "snapkv": (16_384, 1024),
    "pyramidkv": (8_192, 128),
    "chunkkv": (8_192, 819),
    "d2o": (4_096, 820),
    "k-vec": (16_384, 1024),
    "h2o": (4_096, 820),
    "streaming-llm": (4_096, 1024),
}
"""By file: tokens of a prompt, and entries that a head stores of it on average, window included."""


@pytest.mark.parametrize("name", SIZES)
def test_a_paper_stores_what_it_prints(name: str) -> None:
    path = FOLDER / f"{name}.json"
    config = parse_config(read_config_file(path), path.name)
    num_tokens, stored = SIZES[name]
    assert config.num_slots(num_tokens) == stored
    assert config.shares[-1] == config.budget and config.bits == 16  # an entry is a row, and none is evicted later
    policy = build_policy(config.policy, config.policy_options)
    assert policy is not None
    window = policy.scorer.kept_window
    assert config.tail_tokens == (window or 1)  # the window, or as little as there can be


def test_every_file_is_tested_and_listed() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(SIZES)
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, (num_tokens, stored) in SIZES.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"| [`{name}.json`]"))
        assert f"{stored:,} of {num_tokens:,}" in line
