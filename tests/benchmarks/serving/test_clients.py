from __future__ import annotations

import pytest

pytestmark = pytest.mark.sglang


def stream_of(sent: float, *moments: float):
    from serving_bench.streams import Stream

    return Stream(sent, tuple((moment, i + 1) for i, moment in enumerate(moments)), 10, 5, ())


def test_only_what_arrives_in_time_counts() -> None:
    from serving_bench.clients import figures

    found = figures([stream_of(0.0, 1.0, 2.0, 4.0, 9.0), stream_of(0.5, 1.5, 2.0)], 1.0, 5.0)
    assert found["decode_tokens_per_s"] == 3 / 4
    assert found["inter_token_ms"] == 1000 and found["inter_token_p99_ms"] == 2000
    assert found["ttft_s"] == 1.0


def test_nothing_is_told_of_what_did_not_happen() -> None:
    from serving_bench.clients import figures

    assert figures([], 0.0, 2.0) == {"decode_tokens_per_s": 0.0}


def test_one_in_a_hundred_is_beyond_the_99th_percentile() -> None:
    from serving_bench.clients import percentile

    assert percentile([1.0] * 99 + [7.0], 0.99) == 1.0 and percentile([1.0] * 98 + [7.0] * 2, 0.99) == 7.0


def test_steps_are_those_of_the_answer_that_got_most() -> None:
    from serving_bench.clients import tokens_between

    assert tokens_between([stream_of(0, 1, 2, 3, 4), stream_of(0, 2.5, 3.5)], 1.5, 3.0) == 2
    assert tokens_between([], 0.0, 1.0) == 0


def test_every_context_comes_once_before_any_comes_again() -> None:
    from kvevict_quality.sample import Question, Sample
    from serving_bench.needles import Context, rounds

    questions = tuple(Question(str(i), "", ("x",), 4) for i in range(2))
    contexts = [Context([i], Sample("", questions)) for i in range(6)]
    found = rounds(contexts, [4] * 3)
    assert [len(asked) for asked in found] == [4, 4, 4]
    order = [(context.ids[0], question.text) for asked in found for context, question in asked]
    assert {context for context, _ in order[:6]} == {context for context, _ in order[6:]} == set(range(6))
    assert {text for _, text in order[:6]} == {"0"} and {text for _, text in order[6:]} == {"1"}


def test_a_hit_lasts_from_the_request_to_the_whole_answer() -> None:
    from bench_hits import figures
    from serving_bench.streams import Stream

    hits = [Stream(10.0, ((10.2, 1), (10.0 + seconds, 2)), 100, 95, (1, 2)) for seconds in (3.0, 1.0, 2.0, 9.0)]
    assert figures(hits) == {"hit_s": 2.5, "hit_p95_s": 9.0, "found_pct": 95.0}
    assert figures(hits[:3] * 20)["hit_p95_s"] == 3.0


def test_points_with_and_without_passes_share_no_text() -> None:
    from bench_hot import POINTS

    assert len({point.document for point in POINTS}) == len(POINTS)


def test_every_bar_is_about_a_point_and_a_system_that_is_measured() -> None:
    """A renamed point would show as "not measured yet" for good."""
    import bars
    import bench_hits
    import bench_hot
    import bench_pressure
    import bench_shared_prefix

    points = {
        "hits": {bench_hits.all_of(point.name) for point in bench_hits.POINTS},
        "hot": {point.name for point in bench_hot.POINTS},
        "pressure": {name for point in bench_pressure.POINTS for name in bench_pressure.names_of(point)},
        "shared-prefix": {point.name for point in bench_shared_prefix.POINTS},
    }
    for bar in bars.BARS:
        assert bar.point in points.get(bar.benchmark, {bar.point}), bar
    systems = {"pass_share 1", "budget 1", "default"}
    hot = [bar for bar in bars.BARS if bar.benchmark == "hot"]
    assert {bar.system for bar in hot} | {bar.baseline for bar in hot if not bar.is_absolute} <= systems
