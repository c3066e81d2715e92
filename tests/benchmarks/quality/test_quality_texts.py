"""Tasks whose texts and questions come from elsewhere; the texts here are small ones in the same formats."""

from __future__ import annotations

import random
import re

import pytest
from kvevict_quality import archives
from kvevict_quality.tasks import texts
from kvevict_quality.tasks.texts import ShortAnswer


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


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
