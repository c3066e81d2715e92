"""A context that shrinks in two stages: what is sent, what is counted, what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from sgl_kvevict.config import KVEvictConfig

CONTEXT = list(range(100, 200))
CONFIG = KVEvictConfig(tail_tokens=20, budget=0.2)


class FakeServer:
    """Its context shrinks to one size beside another prompt, then to another one."""

    url = "http://fake"

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.prompts: list[list[int]] = []
        self.looks = 0

    def post(self, path: str, body: object = None, timeout_s: float = 0.0) -> str:
        self.prompts.append(body["input_ids"])
        return json.dumps({"output_ids": [5], "meta_info": {"finish_reason": {"type": "length"}}})

    def get_json(self, path: str, timeout_s: float) -> object:
        spans = ((80, self.sizes[0]), (80 + 200, self.sizes[1] + 100))[self.looks]
        self.looks += 1
        return {"internal_states": [{"kvevict": dict(zip(("span_tokens", "span_slots"), spans, strict=True))}]}


@pytest.fixture
def asking(monkeypatch):
    from kvevict_quality import asking

    monkeypatch.setattr(asking, "flush", lambda server: None)
    monkeypatch.setattr(asking, "wait_until_scored", lambda server: 0.0)
    monkeypatch.setattr(asking, "warm", lambda url, **request: SimpleNamespace(outcome="compressed"))
    return asking


def test_another_prompt_that_does_not_fit_is_sent_before_the_passes(asking):
    server = FakeServer(40, 16)
    prepared = asking.prepare_in_two_stages(server, CONTEXT, CONFIG, 300)
    first, other = server.prompts
    assert first == CONTEXT and other[0] != CONTEXT[0] and 300 < len(first) + len(other) < 300 + 40
    assert (prepared.tokens, prepared.slots) == (100, 16 + 20)


@pytest.mark.parametrize("sizes", [(80, 16), (16, 16), (40, 40), (40, 8)])
def test_a_context_of_another_size_is_an_error(asking, sizes):
    with pytest.raises(RuntimeError, match="80 tokens were to shrink to"):
        asking.prepare_in_two_stages(FakeServer(*sizes), CONTEXT, CONFIG, 300)
