"""The GPU benchmark works, as far as a machine without a GPU can tell: tiny sizes in Triton's interpreter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_all
import torch
from gpu_bench import decode, insertion, shapes
from gpu_bench.checks import correctness
from gpu_bench.ordering import poisoned_slots
from gpu_bench.setting import SMOKE

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def _interpreted(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the device here: run the benchmark itself")
    monkeypatch.setattr("kvevict_kernels.dispatch.TRITON_DEVICES", ("cuda", "cpu"))


@pytest.mark.usefixtures("_interpreted")
def test_every_kernel_is_right():
    rows = correctness(SMOKE)
    assert len(rows) == 10
    assert [row["kernel"] for row in rows if not row["right"]] == []


@pytest.mark.usefixtures("_interpreted")
def test_errors_and_ordering():
    assert decode.error(SMOKE)[0]["ratio"] < 2
    assert poisoned_slots(SMOKE) == [{"fence": True, "forwards": 2, "wrong forwards": 0}]


@pytest.mark.usefixtures("_interpreted")
def test_what_is_timed_runs():
    tiny = replace(SMOKE, batches=(2,), sharers=(2,), prefix_tokens=64)
    assert [row["bits"] for row in decode.bandwidth(tiny)] == [16, 16, 4]
    assert decode.sharers(tiny)[0]["sharers"] == 2
    assert decode.planning(tiny)[0]["us, new batch"] > 0
    moved = insertion.compaction(tiny)[0]
    assert moved["MB read and written once"] > 0
    assert 1 < moved["share of copy, temporary counted"] / moved["share of copy"] < 2
    assert [row["policy"] for row in insertion.compression(tiny)] == list(insertion.POLICIES)
    assert len(shapes.shapes(tiny)) == 4
    assert [row["new tokens"] for row in shapes.extend(tiny)] == [3, 40] + 2 * [3, 3, 40, 40]


def test_what_is_measured_is_on_disk_before_the_next_section_begins(tmp_path, monkeypatch):
    """A time limit of the machine ends the whole run."""
    head = {"device": "D", "date": "2026-01-01T10:00", "versions": {}, "setting": {}, "failures": {}}

    def measure(section: str, device: str, **_: object) -> dict[str, object]:
        if section == "ordering":
            raise KeyboardInterrupt
        return head | {"sections": {section: [{"requests": 1, "plan / step": 7.0}]}}

    monkeypatch.setattr(run_all, "measure", measure)
    args = SimpleNamespace(limit=10.0, smoke=True, out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_all.run_part(("planning", "ordering"), "D", args)
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["sections"].keys() == {"planning"}
    assert "| 1 | 7 |" in next(tmp_path.glob("*.md")).read_text()


def test_a_section_finds_what_is_on_pythonpath(tmp_path, monkeypatch):
    """SGLang and FlashInfer may be there by PYTHONPATH only."""
    script = tmp_path / "section.py"
    script.write_text("import json, os\nprint(json.dumps({'rows': [os.environ['PYTHONPATH']]}))\n")
    monkeypatch.setattr(run_all, "__file__", str(script))
    monkeypatch.setenv("PYTHONPATH", "/kit/site")
    results = run_all.measure("graph", "D", is_smoke=False, seconds=60.0)
    assert results["sections"]["graph"] == [f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tools'}:/kit/site"]
