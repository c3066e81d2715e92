"""Tables by model, and how well divergences predict losses."""

from __future__ import annotations

import pytest

from .test_quality_results import row


def full(**changes):
    return row(**{"engine": "stock", "policy": "full", "budget": 1.0, **changes})


def test_standard_errors_are_of_the_same_questions():
    from kvevict_quality.by_model import paired_share

    assert paired_share([1, 0, 0.5], [1, 0, 0.5]) == (1.0, 0.0)  # what both miss costs nothing
    share, error = paired_share([1, 1, 1, 1], [1, 1, 1, 0])
    assert share == 0.75 and error == pytest.approx((3 * 0.25**2 + 0.75**2) ** 0.5 / 4)
    with pytest.raises(ValueError, match="got 1 beside 2"):
        paired_share([1, 0], [1])


def test_models_stand_below_each_other_and_needle_tasks_count_together():
    from kvevict_quality.by_model import model_table

    rows = [
        full(scores="1 1"),
        full(task="needle-multi-key", scores="0 1"),
        full(task="squad", scores="0.5 0.5", model="q"),
        row(scores="1 0"),
        row(task="needle-multi-key", scores="0 1"),
        row(policy="distilled", task="squad", scores="0.5 0.5", model="q"),
    ]
    assert model_table(rows).splitlines()[0].endswith("| full | `distilled` 0.2 | `snapkv` 0.2 |")
    assert model_table(rows).splitlines()[2:] == [
        "| m | 1,024 | `needles` | 4 | 0.75 |  | 67 ± 27 % |",
        "| q | 1,024 | `squad` | 2 | 0.50 | 100 ± 0 % |  |",
    ]


def test_a_context_that_lost_answers_is_a_point_with_its_divergence():
    from kvevict_quality.prediction import Point, points

    rows = [
        full(contexts=3, scores="1 1 0 0 1 0", divergences="0 0 0"),
        row(contexts=3, scores="1 0 1 1 1 0", divergences="0.5 0.1 0.2"),
        row(policy="echo", contexts=3, scores="1 0 1 1 1 0"),
    ]
    task = ("m", "needle-single", "snapkv", 0.2)
    assert points(rows) == [Point(*task, 0.5, 0.5), Point(*task, 0.2, 0.0)]  # the second has no answers to lose


def test_correlation_of_contexts_and_of_means(tmp_path):
    from kvevict_quality.prediction import Point, draw, prediction_table

    found = [
        Point("m", task, "distilled", budget, divergence, loss)
        for task, budget, divergence, loss in [
            *(("squad", 0.2, 0.1, 0.0), ("squad", 0.1, 0.3, 0.5), ("squad", 0.1, 0.2, 0.25)),
            *(("table", 0.2, 0.4, 0.75), ("table", 0.1, 0.5, 0.7)),
        ]
    ]
    lines = prediction_table(found).splitlines()
    assert "| m | all | 5 | 0.90 | 4 | 0.80 |" in lines
    assert "| m | `squad` | 3 | 1.00 | 2 |  |" in lines
    assert "| m | `distilled` 0.1 | 3 | 1.00 | 2 |  |" in lines
    assert not any("`table`" in line for line in lines)  # two points tell nothing
    draw(found, tmp_path / "divergence.png")
    assert (tmp_path / "divergence.png").stat().st_size > 10_000


def test_probes_are_parts_of_the_context_that_stay_uncompressed(prompts):
    from kvevict_quality.fidelity import PROBE_TOKENS, make_probes
    from kvevict_quality.sample import Sample

    from sgl_kvevict.config import KVEvictConfig

    sample = Sample(" ".join(f"word{i}" for i in range(1000)), ())
    ids = prompts.context_ids(sample)
    probes = make_probes(prompts, sample, ids)
    places = [ids.index(probe.continuation_ids[probe.num_given]) for probe in probes]
    assert places == sorted(places) and places[-1] > len(ids) - 2 * PROBE_TOKENS
    for probe, place in zip(probes, places, strict=True):
        assert probe.continuation_ids[probe.num_given :] == ids[place : place + PROBE_TOKENS]
        assert len(probe.continuation_ids) <= KVEvictConfig().min_prefix_tokens / 2
