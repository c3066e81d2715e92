from __future__ import annotations

from pathlib import Path

import pytest
from serving_bench.compare import median, ratio
from serving_bench.page import Page, Table, markdown, write_page
from serving_bench.results import RESULTS, Row, read_rows, replace_points, write_rows

ORIGIN = {"date": "2026-01-02 03:04", "commit": "abc", "machine": "2", "versions": "v", "options": "o"}
PAGE = Page("bench", "python bench.py", "What is measured.", (Table("speed", "Speed, 1/s"), Table("hits", "Hits, %")))


def rows_of(point: str, stock: list[float], ours: list[float]) -> list[Row]:
    pairs = [("stock", stock), ("budget 0.2", ours)]
    return [Row(point, s, i + 1, {"speed": v}, ORIGIN) for s, values in pairs for i, v in enumerate(values)]


def test_ratios_are_taken_repetition_by_repetition() -> None:
    """A slow minute that meets both systems does not show in the ratio."""
    rows = rows_of("p", [10.0, 1.0, 10.0], [40.0, 4.0, 50.0])
    found = ratio(rows, "p", "budget 0.2", "speed", "stock")
    assert found is not None
    assert (found.median, found.low, found.high) == (4.0, 4.0, 5.0)
    assert str(found) == "4.00 (4.00-5.00)"
    assert median(rows, "p", "stock", "speed") == 10.0
    assert ratio(rows, "p", "budget 0.2", "hits", "stock") is None


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = [*rows_of("p", [1.5], [2.0]), Row("q", "stock", 1, {"hits": 97.0}, ORIGIN)]
    write_rows(tmp_path / "x.csv", rows)
    assert read_rows(tmp_path / "x.csv") == rows
    assert read_rows(tmp_path / "absent.csv") == []


def test_measured_points_replace_old_ones_and_unknown_ones_go() -> None:
    old = [*rows_of("a", [1.0], [1.0]), *rows_of("b", [1.0], [1.0]), *rows_of("gone", [1.0], [1.0])]
    new = rows_of("b", [2.0], [2.0])
    merged = replace_points(old, new, ["b", "a"])
    assert [(row.point, row.metrics["speed"]) for row in merged] == [("b", 2.0)] * 2 + [("a", 1.0)] * 2


def test_a_page_shows_medians_ratios_and_origin(tmp_path: Path) -> None:
    rows = rows_of("p", [10.0, 10.0, 10.0], [39.0, 41.0, 50.0])
    text = markdown(PAGE, rows)
    assert "| p | 10.00 | 41.00 = **4.10x** (3.90-5.00) |" in text
    assert "| 2026-01-02 03:04 | abc | 2 | v | o |" in text
    assert write_page(PAGE, rows, tmp_path).read_text() == text
    assert (tmp_path / "bench.png").stat().st_size > 1000


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.stem)
def test_committed_results_say_where_they_come_from(path: Path) -> None:
    if path.stem == "smoke":
        return
    rows = read_rows(path)
    assert rows
    for row in rows:
        assert row.metrics and row.repetition >= 1
        assert all(row.origin[field] for field in ORIGIN)
    assert path.with_suffix(".md").exists() and path.with_suffix(".png").exists()
