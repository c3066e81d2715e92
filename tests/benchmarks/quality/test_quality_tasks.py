from __future__ import annotations

import re

import pytest
from kvevict_quality.tasks import TASKS, make_sample

TOKENS_AROUND_AN_EXCHANGE = 12  # of the demo model's chat template


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def samples(task, tokens, seed=0, num=3):
    return [make_sample(task, tokens, seed, index, count) for index in range(num)]


@pytest.mark.parametrize("tokens", [1024, 2048, 4096])
def test_contexts_are_long_hold_all_answers_and_fit(tokens):
    for task in TASKS:
        for sample in samples(task, tokens):
            text = sample.context + " ".join(part for exchange in sample.history for part in exchange)
            template = TOKENS_AROUND_AN_EXCHANGE * len(sample.history)
            assert 0.8 * tokens < count(text) + template <= tokens, task
            for question in sample.questions:
                assert all(answer in text for answer in question.answers), task
                assert not any(answer in question.text + question.lead for answer in question.answers if len(answer) > 3
                               and answer.isdigit()), task  # fmt: skip


def test_contexts_repeat_for_a_seed_and_differ_between_contexts_and_seeds():
    for task in TASKS:
        assert samples(task, 1024) == samples(task, 1024)
        contexts = samples(task, 1024) + samples(task, 1024, seed=1)
        assert len({(s.context, s.history) for s in contexts}) == len(contexts), task


def test_questions_of_a_context_are_several_and_different():
    for task in TASKS:
        for sample in samples(task, 1024):
            assert len({q.text for q in sample.questions}) == len(sample.questions) >= 3, task


def test_shots_show_the_rule_that_is_asked_for():
    (shots,) = samples("few-shot", 1024, num=1)
    kinds = {reply.removeprefix("Class: ") for _, reply in shots.history}
    assert kinds == {"fruit", "city", "animal"} == {answer for q in shots.questions for answer in q.answers}
    shown = " ".join(sentence for sentence, _ in shots.history)
    assert not any(question.text in shown for question in shots.questions)
    (lists,) = samples("pattern", 1024, num=1)
    assert all(reply == f"Answer: {given.split(', ')[-1]}" for given, reply in lists.history)
    assert all(q.answers == (q.text.split(", ")[-1],) for q in lists.questions)
    assert not {q.text for q in lists.questions} & {given for given, _ in lists.history}


def test_a_long_chat_repeats_questions_that_were_answered_once():
    (chat,) = samples("long-chat", 2048, num=1)
    replies = dict(chat.history)
    assert len(chat.history) > 20
    assert all(f"is {question.answers[0]}." in replies[question.text] for question in chat.questions)
