"""What flows pass through is counted, and does not grow."""

from __future__ import annotations

import json

import pytest
from trace_flows import NOW, enum_members, trace

from helpers.harness import publish_server_args

BEFORE = NOW.with_name("flows-before.json")


@pytest.fixture(scope="module")
def flows(tmp_path_factory):
    publish_server_args(tmp_path_factory.mktemp("args"))
    return trace()


def test_a_prompt_goes_through_tree_policy_and_kernels(flows):
    files = flows["a new prompt, compressed at once"]["names of files"]
    assert "sgl_kvevict/sglang_adapter/tree.py" in files
    for folder in ("sgl_kvevict/policies/", "kernels/"):
        assert any(name.startswith(folder) for name in files)
    ample = flows["a new prompt, slots are ample"]
    assert not ample["resized by"] and not any(name.startswith("kernels/") for name in ample["names of files"])


def test_a_shrink_is_followed_from_sglangs_question_to_the_released_slots(flows):
    for name in ("the first shrink", "the second shrink"):
        resized_by = flows[name]["resized by"]
        assert any("sglang_adapter/" in function for function in resized_by)
        assert len(resized_by) > 2 and not any(function.startswith("kernels/") for function in resized_by)


def test_every_flow_crosses_into_our_code_and_calls_it(flows):
    for name, counts in flows.items():
        assert 0 < counts["files"] <= counts["functions"] < counts["calls"] and counts["crossings"], name


def test_flows_enter_no_more_files_than_was_counted(flows):
    counted = json.loads((NOW if NOW.exists() else BEFORE).read_text(encoding="utf-8"))["flows"]
    grown = {name: (counts["files"], counted[name]["files"]) for name, counts in flows.items()}
    assert {name: figures for name, figures in grown.items() if figures[0] > figures[1]} == {}, "see `make flows`"


def test_members_of_enumerations_are_counted_by_folder():
    counts = enum_members()
    assert counts["sgl_kvevict"] > 0 and counts["sgl_kvevict/policies"] > 0
