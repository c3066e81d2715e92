"""Agents of recorded lengths, and customers of tau2: their prompts, and what counts as right."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

POOL, TURNS = 1200, 3
TOOLS = '''
@tool
def get_order() -> Tool:
    async def execute(order_id: str, numbers: list[int], strict: bool) -> str:
        """Look an order up."""
        return orders[order_id]

    return execute


def helper() -> None:
    pass
'''


class WordTokenizer:
    """One token a word, a chat template of two words."""

    chat_template = "here"

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.words += [word for word in dict.fromkeys(text.split()) if word not in self.words]
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(self.words[i] for i in ids)

    def apply_chat_template(self, chat: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        return "".join(f"<{each['role']}> {each['content']} <end> " for each in chat) + "<assistant> "


@pytest.fixture(scope="module")
def prompts():
    from kvevict_quality.sample import Prompts

    return Prompts(WordTokenizer())


def test_agents_have_the_recorded_lengths_share_what_was_shared_and_can_be_asked(prompts) -> None:
    from serving_bench.agents import UNIT_TOKENS, make_agents, traces, turn_of, working_set

    agents = make_agents(prompts, 2, 4 * POOL, TURNS)
    assert working_set(agents) >= 4 * POOL and working_set(agents[:-1]) < 4 * POOL
    for agent in agents:
        assert len(agent.turns) == TURNS and len(agent.turns[-1].ids) == UNIT_TOKENS * len(agent.units)
        for before, after in pairwise(agent.turns):
            assert 0 < len(after.ids) <= UNIT_TOKENS * traces.MAX_CONTEXT // traces.UNIT
            assert sum(a == b for a, b in zip(before.ids, after.ids, strict=False)) > len(before.ids) / 2
        for context in agent.turns:
            text = prompts.decode(context.ids)
            assert all(f"{each.lead} {answer}" in text for each in context.sample.questions for answer in each.answers)
    again = make_agents(prompts, 2, 4 * POOL, TURNS)
    assert [each.turns[-1].ids for each in again] == [each.turns[-1].ids for each in agents]
    assert make_agents(prompts, 3, 4 * POOL, TURNS)[0].turns[0].ids != agents[0].turns[0].ids
    assert len(turn_of(agents, 1)) == len(agents)
    assert len(turn_of(agents, 1, all_questions=True)) == sum(len(each.turns[1].sample.questions) for each in agents)


def test_a_question_is_asked_only_while_its_answer_is_in_the_history(prompts) -> None:
    """An agent that begins anew has left its tools' outputs behind."""
    from serving_bench.agents import Writer, traces

    turns = [traces.Turn(list(range(1, 301)), [], 0.0, 0), traces.Turn([*range(1, 21), *range(400, 500)], [], 0.0, 0)]
    agent = Writer(prompts).agent(traces.Conversation("a", 20, (640, 640), turns), 2, 0)
    assert agent is not None
    assert len(agent.turns[0].sample.questions) == 6 and agent.turns[1].sample.questions == ()
    assert agent.turns[0].ids[:40] == agent.turns[1].ids[:40]
    short = traces.Conversation("b", 20, (640, 640), [traces.Turn(list(range(1, 40)), [], 0.0, 0)] * 2)
    assert Writer(prompts).agent(short, 2, 0) is None and Writer(prompts).agent(short, 3, 0) is None


def test_customers_are_asked_before_each_call_that_solves_their_task() -> None:
    from serving_bench.tool_calls import RESULT_CHARACTERS, conversation, tools_of

    tools = tools_of(TOOLS)
    assert [each["function"]["name"] for each in tools] == ["get_order"]
    schema = tools[0]["function"]["parameters"]["properties"]
    assert {name: each["type"] for name, each in schema.items()} == {
        "order_id": "string",
        "numbers": "array",
        "strict": "boolean",
    }
    database = {"orders": {"#1": {"items": "x" * 2 * RESULT_CHARACTERS}}}
    actions = [{"name": "get_order", "arguments": {"order_id": "#1"}}, {"name": "leave", "arguments": {"to": 3}}]
    told = {"reason_for_call": "An order is late.", "known_info": "It is #1."}
    task = {"user_scenario": {"instructions": told}, "evaluation_criteria": {"actions": actions * 2}}
    asked = conversation("Be kind.", tools, database, task)
    assert [len(each.messages) for each in asked] == [2, 4, 6, 8]
    assert all(after.messages[: len(before.messages)] == before.messages for before, after in pairwise(asked))
    results = [each["content"] for each in asked[-1].messages if each["role"] == "tool"]
    assert len(results[0]) == RESULT_CHARACTERS and results[1] == "ok"
    call = asked[-1].messages[2]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"]) == actions[0]["arguments"]
