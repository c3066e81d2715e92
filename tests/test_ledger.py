"""What each option is for, and how large the code may be. Ceilings go down, never up.

A new option needs a row of ``docs/results`` that it moves, or a requirement; it enters with what it replaces.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from sgl_kvevict.config import EventsConfig, KVEvictConfig
from sgl_kvevict.policies.methods import METHODS
from sgl_kvevict.request import RequestOptions
from sgl_kvevict.sglang_adapter.hooks import FEATURES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"

PAPERS = "required by the papers, whose policies are configured by it"
MODELS = "required by models without a shipped file of scores"
OPERATORS = "required by operators: size, place and access are theirs to choose"
EXTREMES = "required by measurements: the control that every policy is compared with"

FIELDS = {
    "policy": PAPERS,
    "budget": "quality/dial.csv: 0.1",
    "compress": 'serving/shared-prefix.md: compress="when short"',
    "bits": "quality/bits.md: auto",
    "min_budget": "serving/pressure.md: 16x the pool",
    "tail_tokens": PAPERS,
    "sink_tokens": "quality/bits.md: the first tokens, too",
    "min_prefix_tokens": PAPERS,
    "answer_block": "quality/answers.md: blocks of 512",
    "policy_options": PAPERS,
    "score_weights": MODELS,
    "score_texts": MODELS,
    "attention": "gpu/2026-11-26-nvidia-h200.md: FlashInfer beside our kernels",
    "host_bytes": "serving/store.md: host memory",
    "store": "serving/store.md: after a restart",
    "store_bytes": OPERATORS,
    "store_complete": "quality/complete.md: ",
    "store_wait_ms": OPERATORS,
    "events": OPERATORS,
    "events.endpoint": OPERATORS,
    "events.expose_tokens": OPERATORS,
}
REQUEST_OPTIONS = {
    "exact": "quality/complete.md: exact",
    "complete": "quality/complete.md: complete",
    "share": "quality/complete.md: share",
    "retain": "serving/pressure.md: a prefix, after a burst of 4x the pool",
}
POLICIES = {
    "distilled": "quality/results.csv: distilled",
    "random": EXTREMES,
    **dict.fromkeys(
        ("ada-pyramidkv", "ada-snapkv", "chunkkv", "d2o", "h2o", "k-vec", "pyramidkv", "snapkv", "streaming-llm"),
        PAPERS,
    ),
}
CEILINGS = {
    "sgl_kvevict/attention": 1_573,
    "sgl_kvevict/cache": 2_639,
    "sgl_kvevict/cli": 1_665,
    "sgl_kvevict/distill": 968,
    "sgl_kvevict/events": 540,
    "sgl_kvevict/policies": 2_080,
    "sgl_kvevict/segments": 1_888,
    "sgl_kvevict/sglang_adapter": 4_734,
    "sgl_kvevict/store": 2_020,
    "kernels": 6_820,
    "sgl_kvevict": 20_394,
    "tests": 32_469,
    "benchmarks": 10_752,
    "tools": 6_828,
}
"""Lines of Python below a folder, but for lines that are a comment: a reason beside a step is never too much."""
FILES = 201
"""Files of the product."""
HOOKS = 20
FIELDS_AND_OPTIONS = 25


def num_lines(path: Path) -> int:
    lines = path.read_text(encoding="utf-8").splitlines()
    return sum(1 for line in lines if not line.lstrip().startswith("#"))


def names(model: type[BaseModel], prefix: str = "") -> list[str]:
    return [prefix + name for name in model.model_fields]


@pytest.mark.parametrize(
    ("known", "ledger"),
    [
        ([*names(KVEvictConfig), *names(EventsConfig, "events.")], FIELDS),
        (names(RequestOptions), REQUEST_OPTIONS),
        ([method.name for method in METHODS], POLICIES),
    ],
    ids=["fields", "request options", "policies"],
)
def test_each_option_says_what_it_is_for(known: list[str], ledger: dict[str, str]) -> None:
    assert sorted(known) == sorted(ledger)
    for name, reason in ledger.items():
        if reason.startswith("required by "):
            continue
        page, _, row = reason.partition(": ")
        text = (RESULTS / page).read_text(encoding="utf-8")
        assert row in text, f"{name}: {page} has no row {row!r}"


@pytest.mark.parametrize("folder", CEILINGS)
def test_no_folder_has_more_lines(folder: str) -> None:
    assert sum(num_lines(path) for path in (ROOT / folder).rglob("*.py")) <= CEILINGS[folder]


def test_there_are_no_more_files_hooks_and_options() -> None:
    assert sum(1 for folder in ("sgl_kvevict", "kernels") for _ in (ROOT / folder).rglob("*.py")) <= FILES
    assert sum(len(feature.hooks) for feature in FEATURES) <= HOOKS
    assert len(FIELDS) + len(REQUEST_OPTIONS) <= FIELDS_AND_OPTIONS
