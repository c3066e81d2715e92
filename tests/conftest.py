"""Set up what must be decided before any test module is imported."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
import torch

if num_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    # Workers share the cores, and so do the servers they start: more threads than cores only wait for each other.
    num_threads = max(1, torch.get_num_threads() // num_workers)
    torch.set_num_threads(num_threads)
    os.environ["OMP_NUM_THREADS"] = str(num_threads)

os.environ.setdefault("SGLANG_PLATFORM", "kvevict_cpu")  # SGLang resolves its platform when it is imported

TESTS = Path(__file__).parent
HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton decides when it is imported whether its kernels run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("helpers.quick_interpreter")


LONGEST = (
    "e2e/test_examples.py",
    "sglang_adapter/test_tree_model.py",
    "e2e/test_identity.py",
    "attention/test_rows_of_few_bits.py",
    "attention/test_sliding_windows.py",
)
"""Files that take more than a minute of CPU time, the longest first."""


@pytest.fixture(scope="module")
def server_args(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The arguments of a server of a tiny model, published as its processes do."""
    from helpers.harness import publish_server_args

    publish_server_args(tmp_path_factory.mktemp("tiny-llama"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, then others with slow tests: workers that take files in this order end together.

    Tests with real servers are slow.
    """
    for item in items:
        if item.path.parent == TESTS / "e2e":
            item.add_marker(pytest.mark.slow)
    longest = {TESTS / name: place for place, name in enumerate(LONGEST)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (longest.get(item.path, len(longest)), item.path not in slow))
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "gpu" in report.keywords]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} GPU tests skipped: no CUDA device")
