"""The questions about real prose: what the file holds, what a context asks, what counts as an answer."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HANDBOOK = ROOT / "examples" / "data" / "station_handbook.txt"
ALICE = ROOT / "tools" / "peers" / "alice.txt"


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


def test_passages_are_short_and_in_the_order_of_the_texts(entries):
    assert all(count(passage_of(entry)) <= 900 for entry in entries)
    assert [entry.paragraph for entry in entries] == sorted(entry.paragraph for entry in entries)


def test_questions_are_many_distinct_and_spread_over_both_texts(entries):
    assert len(entries) >= 200
    assert len({entry.question.text.lower() for entry in entries}) == len(entries)
    assert len({entry.question.lead for entry in entries}) == len(entries)
    for text, at_least in ((HANDBOOK, 100), (ALICE, 40)):
        paragraphs = text.read_text(encoding="utf-8").split("\n\n")
        assert (
            sum(passage_of(entry) in (paragraph.strip() for paragraph in paragraphs) for entry in entries) >= at_least
        )
    per_passage = Counter(entry.paragraph for entry in entries)
    assert len(per_passage) >= 30
    assert max(per_passage.values()) <= 12


def test_questions_are_of_many_kinds_and_do_not_hold_their_answers(entries):
    texts = [entry.question.text for entry in entries]
    for kind in ("Who", "Where", "When", "How many", "How often", "What", "Which", "Why"):
        assert sum(text.startswith(kind) for text in texts) >= 10, kind
    for entry in entries:
        question = entry.question
        assert question.text.endswith("?")
        for form in (*question.answers, *question.variants):
            assert form.lower() not in f"{question.text} {question.lead}".lower(), question.text


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


def test_what_is_asked_about_stands_at_different_places_of_the_contexts(entries):
    passages = {entry.question.text: passage_of(entry) for entry in entries}
    places = [
        sample.context.index(passages[question.text]) / len(sample.context)
        for sample in contexts(0)
        for question in sample.questions
    ]
    for low in (0.0, 0.25, 0.5):
        assert sum(low <= place < low + 0.25 for place in places) > len(places) // 8


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
