"""Tasks; texts of those that come from elsewhere are small ones in the same formats here."""

from __future__ import annotations

import random
import re

import pytest
from kvevict_quality import archives
from kvevict_quality.tasks import TASKS, make_sample, texts
from kvevict_quality.tasks.texts import ShortAnswer

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


def short_answer(*answers):
    return ShortAnswer("Who?", 'The answer is "', answers[:1], 24, answers[1:])


@pytest.mark.parametrize(
    ("output", "exact", "f1"),
    [
        ('the Normans."', 1, 1),
        ("NORMANS!\nThey came later.", 1, 1),
        ("Normans of France", 0, 0.5),  # 1 of 3 words, 1 of 1
        ("Rollo", 0, 0),
        ("a man", 0, 0),
        ("", 0, 0),
    ],
)
def test_squad_counts_as_its_own_script_does(output, exact, f1):
    question = short_answer("The Normans")
    assert (question.exact(output), question.score(output)) == (exact, pytest.approx(f1))


def test_the_closest_of_several_right_answers_counts():
    question = short_answer("10th century", "the first half of the 10th century")
    assert question.exact("first half of 10th century") == 1
    assert question.score("in the 10th century") == pytest.approx(0.8)  # 2 of 3 words, 2 of 2


def paragraphs(num):
    return tuple(
        {
            "context": f"Town {i} has {i} gates. " + "It lies by the sea. " * 20,
            "qas": [
                {"question": f"How many gates has town {i}?", "answers": [{"text": str(i)}, {"text": f"{i} gates"}]}
            ],
        }
        for i in range(num)
    )


def test_squad_asks_about_the_paragraphs_of_its_context(monkeypatch):
    monkeypatch.setattr(texts, "_paragraphs", lambda: paragraphs(40))  # one question each, 126 tokens
    sample = texts.squad(random.Random(0), 1200, count)
    assert 1050 < count(sample.context) <= 1200 and len(sample.questions) == 8
    for question in sample.questions:
        (town,) = re.findall(r"town (\d+)", question.text)
        assert f"Town {town} has" in sample.context
        assert question.answers == (town,) and question.variants == (f"{town} gates",)


def test_factbook_asks_for_numbers_that_stand_there_once(monkeypatch):
    areas = {f"part {i}": {"text": f"{i + 100},000 sq km of land and water"} for i in range(60)}
    people = {"Population": {"text": "71,500 (2015 est.)"}, "Capital": {"text": "none"}, "Same": {"text": "71,500"}}
    profile = {"Geography": {"Area": areas}, "People": people | {"Note": {"note": {"text": "12,345"}}}}
    monkeypatch.setattr(archives, "country_profiles", lambda: {"x.json": profile})
    texts._profiles.cache_clear()
    try:
        assert ("Note, note", "12,345") in texts._profiles()["x.json"]
        sample = texts.factbook(random.Random(0), 500, count)
    finally:
        texts._profiles.cache_clear()
    assert 400 < count(sample.context) <= 500 and len(sample.questions) == 8
    for question in sample.questions:
        assert f"{question.lead} {question.answers[0]} sq km" in sample.context
    assert texts._number("71,500 (2015 est.)", "a: 71,500 (2015 est.)\nb: 71,500") == ""
    assert texts._number("71,500 (2015 est.)", "a: 71,500 (2015 est.)\nb: 171,500") == "71,500"
    assert texts._number("none", "a: none") == ""
