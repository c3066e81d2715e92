"""What flows pass through is counted, and does not grow; the worked example's numbers are what happens."""

from __future__ import annotations

import json

import pytest
from trace_flows import NOW, trace
from worked_example import PAGE, example

from helpers.harness import publish_server_args


@pytest.fixture(scope="module")
def flows(tmp_path_factory):
    publish_server_args(tmp_path_factory.mktemp("args"))
    return trace()


def test_a_shrink_is_followed_from_sglangs_question_to_the_released_slots(flows):
    for name in ("the first shrink", "the second shrink"):
        resized_by = flows[name]["resized by"]
        assert any("sglang_adapter/" in function for function in resized_by)
        assert len(resized_by) > 2 and not any(function.startswith("kernels/") for function in resized_by)


def test_flows_enter_no_more_files_than_was_counted(flows):
    counted = json.loads(NOW.read_text(encoding="utf-8"))["flows"]
    grown = {name: (counts["files"], counted[name]["files"]) for name, counts in flows.items()}
    assert {name: figures for name, figures in grown.items() if figures[0] > figures[1]} == {}, "see `make flows`"


def test_the_numbers_of_the_page_are_what_happens(tmp_path):
    publish_server_args(tmp_path)
    assert example() in PAGE.read_text(encoding="utf-8")
