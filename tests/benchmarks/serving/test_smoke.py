from __future__ import annotations

from pathlib import Path

import pytest
from serving_bench.results import Row


def test_a_ratio_below_the_limit_is_a_regression() -> None:
    from smoke import regressions

    committed = {"a": 2.0, "b": 1.0}
    assert regressions({"a": 1.61, "b": 5.0}, committed) == []
    assert regressions({"a": 1.59, "b": 1.0}, committed) == ["a: 1.59 is below 80% of the committed 2.00"]
    assert regressions({"a": 2.0}, committed) == ["b: committed, but not measured"]


def test_costs_are_turned_round() -> None:
    from smoke import Check, ratios

    rows = [Row("p", "stock", 1, {"t": 3.0, "v": 1.0}), Row("p", "default", 1, {"t": 1.0, "v": 2.0})]
    assert ratios(rows, "p", (Check("time", "t", True), Check("speed", "v"))) == {"time": 3.0, "speed": 2.0}
    with pytest.raises(ValueError, match="w was not measured"):
        ratios(rows, "p", (Check("w", "w"),))


def test_records_are_read_back(tmp_path: Path) -> None:
    from serving_bench.options import Options
    from smoke import read_committed, record

    record(tmp_path / "smoke.csv", {"a": 1.25}, Options((), 3, True, "", tmp_path, tmp_path))
    assert read_committed(tmp_path / "smoke.csv") == {"a": 1.25}
