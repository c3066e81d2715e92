"""How often an answer changes: what brings a context to its shares, what is asked when, and what is counted."""

from __future__ import annotations

import json

import pytest

from sgl_kvevict.config import KVEvictConfig

CONFIG = KVEvictConfig(tail_tokens=20, bits=16, min_budget=0.1)


@pytest.fixture
def sameness():
    import sameness

    return sameness


def test_a_filler_leaves_the_context_as_many_slots_as_its_next_share_and_no_more(sameness):
    """Of 100 tokens and 20 of a tail, with 30 of questions, in 200 slots: half-way between two shares."""
    found = sameness.stages(CONFIG.model_copy(update={"host_bytes": 0}), 120, 30, 200)
    left = [(stage.name, 200 - stage.filler_tokens) for stage in found]
    assert left == [("ample slots", 200), ("0.5", 50 + 75), ("0.2", 50 + 35), ("0.1", 50 + 15), ("returned", 8)]


def test_with_host_memory_nothing_shrinks_below_the_budget(sameness):
    names = [stage.name for stage in sameness.stages(CONFIG, 120, 30, 200)]
    assert names == ["ample slots", "0.5", "0.2", "returned"]


def test_every_stage_comes_twice(sameness):
    found = sameness.stages(CONFIG, 120, 30, 200)
    asked = sameness.schedule(found, 30)
    assert len(asked) == 30 and asked[:6] == [found[0]] * 3 + [found[1]] * 3
    assert asked[12:15] == [found[0]] * 3 and asked[24:] == [found[0]] * 3 + [found[1]] * 3
    assert len(sameness.schedule(found, 3)) == 3


class FakeServer:
    """Answers with the number of the request, and says that it found everything."""

    url = "http://fake"

    def __init__(self) -> None:
        self.seen: list[dict] = []

    def post(self, path: str, body: dict, timeout_s: float) -> str:
        self.seen.append(body)
        details = {"device": len(body["input_ids"]), "host": 0, "kvevict_compressed": 0}
        meta = {"prompt_tokens": len(body["input_ids"]), "cached_tokens_details": details}
        return json.dumps({"output_ids": [len(self.seen)], "meta_info": meta})


def test_questions_follow_the_context_and_fillers_come_when_the_stage_changes(sameness):
    server = FakeServer()
    asker = sameness.Asker(server, [1, 2, 3], [1, 7, 8], seed=0)
    ample, half = sameness.Stage("ample slots", 0), sameness.Stage("0.5", 50)
    asked = list(asker.asks([([4], 5), ([6], 5)], [ample, half, half, ample]))
    assert [(question, number, stage.name) for question, number, stage, _, _ in asked] == [
        (question, number, name)
        for number, name in enumerate(["ample slots", "0.5", "0.5", "ample slots"])
        for question in (0, 1)
    ]
    (filler,) = [body for body in server.seen if "bootstrap_host" in body]
    assert server.seen.index(filler) == 2 and len(filler["input_ids"]) == 50 and filler["input_ids"][0] == 7
    assert [body["input_ids"] for body in server.seen if body is not filler] == [[1, 2, 3, 4], [1, 2, 3, 6]] * 4
    assert [answer for *_, answer, _ in asked[:3]] == [(1,), (2,), (4,)]
    assert all(report.device == 4 for *_, report in asked)


def rows(answers: list[int], question: str = "0", setup: str = "default") -> list[dict[str, str]]:
    read = {"compressed": "100", "share": "0.50", "bits": "8.0", "commit": "abc"}
    where = {"model": "m", "setup": setup, "task": "table", "context": "0", "question": question}
    return [
        where
        | read
        | {
            "ask": str(i),
            "stage": "0.5" if i % 2 else "ample slots",
            "answer": str(answer),
            "score": "" if setup != "default" else str(1 / (1 + answer)),
        }
        for i, answer in enumerate(answers)
    ]


def test_what_is_counted(sameness):
    assert sameness.changes([0, 0, 1, 1, 0]) == 2 and sameness.changes([0]) == 0
    both = [*rows([0, 1, 0, 2]), *rows([0, 0, 0, 0], "1"), *rows([0, 0, 0, 0], setup="warmed before")]
    assert sameness.of_questions(both) == [[0, 1, 0, 2], [0] * 4, [0] * 4]
    lines = sameness.page(both).splitlines()
    assert "| m | default | 2 | 4 | 75% | 2.0, 3 | 1.5 | abc |" in lines
    assert "| m | warmed before | 1 | 4 | 100% | 1.0, 1 | 0.0 | abc |" in lines
    assert "| m | default | ample slots | 100% | 100 | 0.50 | 8.0 |" in lines
    assert sameness.by_time(both) == {"before": [1, 1], "during": [(1 / 2 + 1 / 3) / 2, 1], "after": [1, 1]}
    assert any(line.startswith("| m | default | 2 | 1.000 | 0.708 (71% ±") for line in lines)
    assert any(line.endswith("| 1.000 (100% ± 0%) |") for line in lines)
    assert "| m | default | 0.5 | 50% | 100 | 0.50 | 8.0 |" in lines
