from __future__ import annotations


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


def test_every_bar_is_about_a_point_and_a_system_that_is_measured() -> None:
    """A renamed point would show as "not measured yet" for good."""
    import bars
    import bench_agents
    import bench_hits
    import bench_judges
    import bench_pressure
    import bench_shared_prefix

    points = {
        "agents": {bench_agents.TURNS, bench_agents.EVERY, bench_agents.DRAFTS},
        "judges": set(bench_judges.POINTS),
        "hits": {bench_hits.all_of(point.name) for point in bench_hits.POINTS},
        "pressure": {name for point in bench_pressure.POINTS for name in bench_pressure.names_of(point)},
        "shared-prefix": {point.name for point in bench_shared_prefix.POINTS},
    }
    for bar in bars.BARS:
        assert bar.point in points.get(bar.benchmark, {bar.point}), bar
