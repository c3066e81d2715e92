from __future__ import annotations

import pytest
from serving_bench.compare import median, ratio
from serving_bench.results import RESULTS, Row, read_rows, replace_points
from serving_bench.streams import Stream, decode_figures
from serving_bench.texts import document, question

from kvevict_tools.models import model_path

ORIGIN = {"date": "2026-01-02 03:04", "commit": "abc", "machine": "2", "versions": "v", "options": "o"}


def rows_of(point: str, stock: list[float], ours: list[float]) -> list[Row]:
    pairs = [("stock", stock), ("budget 0.2", ours)]
    return [Row(point, s, i + 1, {"speed": v}, ORIGIN) for s, values in pairs for i, v in enumerate(values)]


def test_ratios_are_taken_repetition_by_repetition():
    """A slow minute that meets both systems does not show in the ratio."""
    rows = rows_of("p", [10.0, 1.0, 10.0], [40.0, 4.0, 50.0])
    found = ratio(rows, "p", "budget 0.2", "speed", "stock")
    assert found is not None
    assert (found.median, found.low, found.high) == (4.0, 4.0, 5.0)
    assert str(found) == "4.00 (4.00-5.00)"
    assert median(rows, "p", "stock", "speed") == 10.0
    assert ratio(rows, "p", "budget 0.2", "hits", "stock") is None


def test_measured_points_replace_old_ones_and_unknown_ones_go():
    old = [*rows_of("a", [1.0], [1.0]), *rows_of("b", [1.0], [1.0]), *rows_of("gone", [1.0], [1.0])]
    new = rows_of("b", [2.0], [2.0])
    merged = replace_points(old, new, ["b", "a"])
    assert [(row.point, row.metrics["speed"]) for row in merged] == [("b", 2.0)] * 2 + [("a", 1.0)] * 2


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.stem)
def test_committed_results_say_where_they_come_from(path):
    if path.stem == "smoke":
        return
    rows = read_rows(path)
    assert rows
    for row in rows:
        assert row.metrics and row.repetition >= 1
        assert all(row.origin[field] for field in ORIGIN)
    assert path.with_suffix(".md").exists() and path.with_suffix(".png").exists()


def stream(first: float, step: float, count: int) -> Stream:
    return Stream(0.0, tuple((first + i * step, i + 1) for i in range(count)), 10, 5, ())


def test_decode_speed_counts_only_while_all_streams_generate() -> None:
    figures = decode_figures([stream(1.0, 0.5, 9), stream(2.0, 0.5, 5)])
    assert figures["decode_tokens_per_s"] == pytest.approx(4.0)  # two streams, from 2.0 s to 4.0 s
    assert figures["inter_token_ms"] == pytest.approx(500.0)
    assert figures["ttft_s"] == pytest.approx(1.5)


def test_documents_are_as_long_as_asked_and_share_no_long_prefix() -> None:
    model = model_path()
    if model is None:
        pytest.skip("the demo model is not there; make model")
    first, second = document(model, 1, 700), document(model, 2, 700)
    assert (len(first), len(second)) == (700, 700)
    assert first[:6] != second[:6]
    assert question(model, 3) != question(model, 4)
