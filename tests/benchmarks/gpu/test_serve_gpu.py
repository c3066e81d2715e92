"""The script for servers on a GPU: plans, stop rules, rows, and the page that is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_bench.phases
import pytest
import serve_gpu
from gpu_bench import systems
from gpu_bench.phases import Phases, agreement, recorded_outputs
from gpu_bench.rows import COLUMNS, Rows, read_rows
from gpu_bench.systems import NAMES, SMALL, MissingError, require
from gpu_kit import run as gpu_run

from kvevict_tools.launcher import LaunchError


class Clock:
    """Seconds that pass when a server is asked, or starts."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeServer:
    """Answers every request at once, after ``cost`` seconds of the clock."""

    def __init__(self, clock: Clock, cost: float) -> None:
        self.clock, self.cost, self.asked = clock, cost, 0

    def get_json(self, path: str, timeout_s: float = 0.0) -> dict[str, Any]:
        return {"attention_backend": "fa3", "internal_states": [{"memory_usage": {"token_capacity": 4096}}]}

    def post(self, path: str, body: dict[str, Any], timeout_s: float) -> str:
        self.clock.now += self.cost
        self.asked += 1
        count, prompt = body["sampling_params"]["max_new_tokens"], body["input_ids"]
        return json.dumps({"output_ids": [7] * count, "meta_info": {"cached_tokens": len(prompt) - 1}})

    def log(self) -> str:
        return "Capture target decode cuda graph end. bs=[1], elapsed=12.5 s, mem usage=1 GB\n"

    def leak_messages(self) -> list[str]:
        return []


Launched = Callable[..., Any]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def phases(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Phases:
    """Phases of fake servers: a start takes 50 s, a request 0.1 s; 540 s are left."""

    @contextmanager
    def launch(model: Path, **options: Any) -> Iterator[FakeServer]:
        clock.now += 50.0
        yield FakeServer(clock, 0.1)

    monkeypatch.setattr(gpu_bench.phases, "launch", launch)
    rows = Rows(tmp_path, "GPU", 540.0, SMALL.sizes(), clock)
    return Phases(rows, SMALL, tmp_path / "model", tmp_path, is_gpu=True)


def rows_of(phases: Phases) -> list[dict[str, Any]]:
    return read_rows([phases.rows.path])


def test_a_plan_measures_its_systems_in_order(phases: Phases) -> None:
    assert serve_gpu.run(["ours", "fa3"], phases, None) == 0
    whats = ["start", "first", "cached", "decode 1", "decode 2", "fitting", "pressure", "leaks"]
    rows = rows_of(phases)
    assert [(row["system"], row["what"]) for row in rows[1:]] == [
        (system, what) for system in ("budget 0.2", "stock, fa3") for what in whats
    ]
    start, cached = rows[1], rows[3]
    assert (start["pool"], start["attention"], start["capture_s"]) == (4096, "fa3", 12.5)
    assert {"sglang", "sglang-kernel", "transformers", "torch", "triton"} <= start["versions"].keys()
    assert cached["cached_tokens"] == SMALL.document + SMALL.question - 1
    assert rows[7]["found"] > 0.99


def test_what_there_is_no_time_for_is_a_row(phases: Phases, clock: Clock) -> None:
    """After the second start 15 s are left: not enough for a decode; no third server is started."""
    clock.now = 540.0 - 60.0 - 7.0
    assert serve_gpu.run(["ours", "fa3"], phases, None) == 0
    skipped = [row for row in rows_of(phases) if row["what"] == "skipped"]
    assert [(row["system"], row["phase"]) for row in skipped] == [("budget 0.2", "decode 1"), ("stock, fa3", "all")]
    assert skipped[0]["needs_s"] == 25.0 > skipped[0]["left_s"]


def fail(*args: Any, **kwargs: Any) -> Any:
    raise LaunchError("server exited with code 1\nno kernel image")


def test_nothing_follows_a_first_server_that_does_not_start(phases: Phases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench.phases, "launch", fail)
    assert serve_gpu.run(["ours", "fa3"], phases, None) == 3
    (row,) = rows_of(phases)[1:]
    assert (row["system"], row["what"]) == ("budget 0.2", "failed") and row["why"].endswith("no kernel image")


def test_a_later_failure_ends_its_system_only(phases: Phases, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = gpu_bench.phases.launch
    monkeypatch.setattr(
        gpu_bench.phases,
        "launch",
        lambda model, **options: fail() if "fa3" in options["flags"] else launch(model, **options),
    )
    assert serve_gpu.run(["ours", "fa3", "triton"], phases, None) == 1
    assert [row["system"] for row in rows_of(phases) if row["what"] in ("leaks", "failed")] == [
        *("budget 0.2", "stock, fa3", "stock, triton")
    ]


def test_no_server_of_ours_without_the_plugins_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems.importlib.metadata, "entry_points", lambda group: SimpleNamespace(names=set()))
    require(["fa3"])
    with pytest.raises(MissingError, match="SGLang would not find the plugin"):
        require(["fa3", "ours"])


def test_answers_are_compared_token_by_token(tmp_path: Path) -> None:
    """Where answers part, it counts how close the two best tokens of the other system were."""
    first = [[[1, 2, 3], [5.0, 0.02, 4.0]], [[4, 5, 6], [3.0, 2.0, 1.0]]]
    assert agreement(first, first) == "2 of 2"
    apart = [[[1, 9, 8], [5.0, 0.01, 4.0]], first[1]]
    assert agreement(apart, first) == "1 of 2; the two best tokens were up to 0.020 apart where others differ"
    path = tmp_path / "rows.jsonl"
    rows = [{"what": "run"}, {"what": "answers", "system": "budget 0.2", "outputs": first}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert recorded_outputs(path) == {"budget 0.2": first}
    assert recorded_outputs(None) == {}


def test_what_is_expected_has_the_steps_and_phases_of_today() -> None:
    """The committed file, beside which ``make rehearse-gpu`` puts what it finds."""
    lines = gpu_run.EXPECTED.read_text().splitlines()
    steps = {step.name for call in gpu_run.CALLS.values() for step in call} - {"real-answers"}
    assert {line.partition(":")[0] for line in lines} == steps
    for what in COLUMNS:
        for step in steps & NAMES.keys():
            start = f"{step}: {NAMES[step]}, {what.rstrip('0123456789 ')}"
            assert any(line.startswith(start) for line in lines), start
