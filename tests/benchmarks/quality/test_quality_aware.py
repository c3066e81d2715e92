"""Questions in the compressed prompt: what is sent, what is counted, what is refused."""

from __future__ import annotations

import json
import threading

import pytest


class FakeServer:
    """Answers every prompt with its last token, twice, and holds a fifth of what lies before the tail."""

    url = "http://fake"

    def __init__(self, tail_tokens: int, uncompressed: int = 0) -> None:
        self.tail_tokens, self.uncompressed = tail_tokens, uncompressed
        self.prompts: dict[str, list[int]] = {}
        self.lock = threading.Lock()

    def post(self, path: str, body: object = None, timeout_s: float = 0.0) -> str:
        if path != "/generate":
            return ""
        with self.lock:
            assert body["extra_key"] not in self.prompts
            self.prompts[body["extra_key"]] = body["input_ids"]
        last = body["input_ids"][-1]
        assert body["sampling_params"]["temperature"] == 0
        return json.dumps({"output_ids": [last, last], "meta_info": {"finish_reason": {"type": "length"}}})

    def get_json(self, path: str, timeout_s: float) -> object:
        ranges = [len(ids) - self.tail_tokens for ids in self.prompts.values()]
        state = {
            "span_tokens": sum(ranges) - self.uncompressed,
            "span_slots": sum(length // 5 for length in ranges),
        }
        return {"internal_states": [{"kvevict": state}]}


@pytest.fixture
def sample():
    from kvevict_quality.sample import Question, Sample

    context = " ".join(f"word{i}" for i in range(40))
    first, second = Question("What is it?", "It is", ("red",), 2), Question("And where is it?", "It is here", ("x",), 2)
    return Sample(context, (first, second), turns=2)


def test_each_question_ends_a_prompt_of_its_own(prompts, sample, monkeypatch):
    from kvevict_quality import asking

    monkeypatch.setattr(asking, "flush", lambda server: None)
    server, ids = FakeServer(8), prompts.context_ids(sample)
    answers, prepared = asking.ask_aware(server, prompts, sample, ids, 8)
    asked = [ids + prompts.question_ids(sample, question) for question in sample.questions]
    assert sorted(server.prompts.values()) == sorted(asked)  # none follows another one's answer
    assert answers == ["is is", "here here"]
    assert prepared.tokens == sum(map(len, asked)) // 2
    assert prepared.slots == (sum((len(prompt) - 8) // 5 for prompt in asked) + 16) // 2


def test_prompts_that_were_not_compressed_before_the_answer_are_an_error(prompts, sample, monkeypatch):
    from kvevict_quality import asking

    monkeypatch.setattr(asking, "flush", lambda server: None)
    with pytest.raises(RuntimeError, match="were to be compressed"):
        asking.ask_aware(FakeServer(8, uncompressed=3), prompts, sample, prompts.context_ids(sample), 8)
