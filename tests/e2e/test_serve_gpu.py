"""``benchmarks/gpu/serve_gpu.py --tiny`` on a CPU: answers, mixed traffic (phases: test_fake_gpu.py)."""

from __future__ import annotations

import sys
from pathlib import Path

from helpers.preloaded import Preloaded

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"))


def test_answers_and_mixed_traffic_of_tiny_servers(tmp_path: Path, preloaded: Preloaded) -> None:
    import serve_gpu
    from gpu_bench.phases import Phases
    from gpu_bench.rows import Rows, read_rows
    from gpu_bench.systems import SMALL, write_model

    rows = Rows(tmp_path, "CPU", 3600.0, SMALL.sizes())
    model = write_model(tmp_path / "model", SMALL.model)
    phases = Phases(rows, SMALL, model, tmp_path, is_gpu=False, spawn=preloaded.start)
    phases.mixed_seconds = 0.0  # one round
    assert serve_gpu.run(["answers", "mixed"], phases, None) == 0
    found = {(row["system"], row["what"]): row for row in read_rows([rows.path]) if "system" in row}
    assert found["budget 1.0", "answers"]["like_first"] == "8 of 8"
    mixed = found["budget 0.2", "mixed"]
    assert mixed["leaks"] == mixed["errors"] == 0 and mixed["answered"] > 50 and mixed["aborted"] > 0
