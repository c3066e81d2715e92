"""The questions about real prose: what the file holds, what a context asks, what counts as an answer."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.fixture(scope="module")
def entries():
    from kvevict_quality.tasks.reading import entries

    return entries()


def passage_of(entry):
    from kvevict_quality.corpus import prose

    return prose()[entry.paragraph]


def contexts(seed, tokens=1024):
    from kvevict_quality.tasks import make_sample
    from kvevict_quality.tasks.reading import ASKED, entries

    return [make_sample("reading", tokens, seed, index, count) for index in range(len(entries()) // ASKED - 1)]


def test_every_answer_stands_in_its_passage_and_is_short(entries):
    for entry in entries:
        (answer,) = entry.question.answers
        assert answer in passage_of(entry), entry.question.text
        assert 3 <= len(answer) <= 40, answer
        assert len(answer.split()) <= 6, answer


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_asks_every_question_once_except_the_sample_questions(entries, seed):
    from kvevict_quality.sample import SAMPLES_INDEX
    from kvevict_quality.tasks import make_sample

    asked = [question for sample in contexts(seed) for question in sample.questions]
    samples = make_sample("reading", 1024, seed, SAMPLES_INDEX, count).questions
    assert len(samples) == 8
    assert Counter((*asked, *samples)) == Counter(entry.question for entry in entries)


@pytest.mark.parametrize("tokens", [1024, 2048, 4096])
def test_contexts_hold_the_whole_passages_of_their_questions(entries, tokens):
    passages = {entry.question.text: passage_of(entry) for entry in entries}
    for sample in contexts(0, tokens):
        assert 0.8 * tokens < count(sample.context) <= tokens
        needed = {passages[question.text] for question in sample.questions}
        assert len(needed) >= 2
        paragraphs = sample.context.split("\n\n")
        assert needed <= set(paragraphs)
        assert len(set(paragraphs)) == len(paragraphs)


def test_contexts_that_are_too_short_are_refused():
    from kvevict_quality.tasks.reading import reading

    with pytest.raises(ValueError, match="num_tokens: got 50; allowed: at least"):
        reading(random.Random(0), 50, count, 0, 0)


def test_a_passage_that_is_not_there_is_refused(tmp_path, monkeypatch):
    from kvevict_quality.tasks import reading

    line = '{"passage": "No such paragraph", "question": "?", "lead": "", "answer": "x", "variants": []}\n'
    path = tmp_path / "reading.jsonl"
    path.write_text(line, encoding="utf-8")
    monkeypatch.setattr(reading, "QUESTIONS", path)
    reading.entries.cache_clear()
    with pytest.raises(ValueError, match=r"line 1 of reading\.jsonl: got 'No such paragraph', with which 0 paragraphs"):
        reading.entries()


def test_any_form_of_the_answer_counts_once():
    from kvevict_quality.sample import Question

    question = Question("How long?", "Answer:", ("ninety minutes",), 8, ("90 minutes", "an hour and a half"))
    assert question.score(" It takes Ninety minutes.") == 1.0
    assert question.score(" It takes 90 minutes, an hour and a half.") == 1.0
    assert question.score(" It takes nine minutes.") == 0.0
    with pytest.raises(ValueError, match="variants: got some for 2 answers"):
        Question("Which two?", "", ("one", "two"), 8, ("1",))
