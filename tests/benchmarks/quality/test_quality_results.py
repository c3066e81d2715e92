from __future__ import annotations

import math

import pytest
from kvevict_quality import dial
from kvevict_quality.by_model import paired_share
from kvevict_quality.fidelity import agreement, divergence
from kvevict_quality.rows import RESULTS, Row, read_rows
from kvevict_quality.systems import Setup, parse_policy

from kvevict_tools.csv_rows import write_records

ROW = {
    "engine": "kvevict",
    "policy": "snapkv",
    "options": "",
    "budget": 0.2,
    "task": "needle-single",
    "tokens": 1024,
    "contexts": 5,
    "questions": 30,
    "score": 0.4,
    "kl": None,
    "context_tokens": 1000.0,
    "slots": 226.0,
    "prepare_s": 2.5,
    "answer_s": 1.5,
    "model": "m",
    "dtype": "bfloat16",
    "seed": 0,
    "versions": "v",
    "commit": "c",
}


def row(**changes):
    return Row(**{**ROW, **changes})


def test_divergence_of_truncated_distributions():
    half = {0: math.log(0.5), 1: math.log(0.25)}
    other = {0: math.log(0.25), 2: math.log(0.5)}
    assert divergence(half, half) == pytest.approx(0.0)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)  # token 0, and everything else as one outcome
    assert divergence(half, other) == pytest.approx(expected)
    assert agreement([half, half], [half, other]) == 0.5


def test_policies_on_the_command_line():
    assert parse_policy("snapkv") == ("snapkv", {})
    name, options = parse_policy("ada-snapkv:budget_rule=all-layers,window_size=16")
    assert (name, options) == ("ada-snapkv", {"budget_rule": "all-layers", "window_size": 16})
    setup = Setup(name, 0.1, options)
    assert setup.options_text == "budget_rule=all-layers window_size=16"
    assert '"budget": 0.1' in setup.system().env["KVEVICT_CONFIG"]
    with pytest.raises(ValueError, match="'window_size'"):
        parse_policy("snapkv:window_size")


def test_standard_errors_are_of_the_same_questions():
    assert paired_share([1, 0, 0.5], [1, 0, 0.5]) == (1.0, 0.0)  # what both miss costs nothing
    share, error = paired_share([1, 1, 1, 1], [1, 1, 1, 0])
    assert share == 0.75 and error == pytest.approx((3 * 0.25**2 + 0.75**2) ** 0.5 / 4)
    with pytest.raises(ValueError, match="got 1 beside 2"):
        paired_share([1, 0], [1])


def dial_rows(scores, **changes):
    """One question of each task of the dial."""
    of_tasks = zip(dial.TASKS, scores, strict=True)
    return [row(**{"questions": 1, **changes, "task": task, "scores": str(score)}) for task, score in of_tasks]


def test_the_dial_has_a_point_where_all_tasks_were_measured_and_ends_at_the_full_cache():
    ours = {"policy": "distilled"}
    rows = [
        *dial_rows([1, 1, 0.5], policy="full", budget=1.0, slots=1000.0),
        *dial_rows([1, 1, 0], **ours),
        *dial_rows([1, 0, 0], **ours, budget=0.1, slots=130.0)[:2],  # no squad
        *dial_rows([1, 0, 0], **ours, options="bits=16", budget=0.1, slots=130.0),
        *dial_rows([0, 0, 0], **ours, options="sink_tokens=8"),  # no line of its own
        *dial_rows([0, 0, 0], **ours, tokens=4096),
        *dial_rows([0, 0, 0]),  # another policy
        *dial_rows([1, 1, 1], **ours, model="without its full cache"),
        *dial_rows([1, 1, 1], policy="full", budget=1.0, engine="kvpress"),
    ]
    found = [(point.bits, point.budget, point.bytes_share, point.questions) for point in dial.points(rows)]
    assert found == [("16", 0.1, 0.13, 3), ("16", 1.0, 1.0, 3), ("auto", 0.2, 0.226, 3), ("auto", 1.0, 1.0, 3)]
    shares = [(point.share, point.error) for point in dial.points(rows)]
    # errors over the same questions: sqrt(0.6^2 + 0.4^2 + 0.2^2) / 2.5 for 1 of 2.5
    assert shares == [(0.4, pytest.approx(0.2993, abs=1e-4)), (1.0, 0.0), (0.8, pytest.approx(0.196)), (1.0, 0.0)]


def test_the_committed_dial_is_that_of_the_rows(tmp_path):
    found = dial.points(read_rows(RESULTS))
    write_records(tmp_path / "dial.csv", dial.Point, found)
    assert (tmp_path / "dial.csv").read_text() == RESULTS.with_name("dial.csv").read_text()
    dial.draw(found, tmp_path / "dial.png")
    assert (tmp_path / "dial.png").stat().st_size > 10_000
