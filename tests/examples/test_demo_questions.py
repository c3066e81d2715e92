from __future__ import annotations

import pytest
from kvevict_demo.questions import BRANCH_QUESTIONS, CHAT_QUESTIONS, DOCUMENT, Question

ALL = (*BRANCH_QUESTIONS, *CHAT_QUESTIONS)


@pytest.mark.parametrize("question", ALL, ids=lambda q: q.text)
def test_expected_answers_are_in_the_document_but_not_in_what_is_asked(question: Question) -> None:
    document = " ".join(DOCUMENT.read_text(encoding="utf-8").split()).lower()
    asked = f"{question.text} {question.lead}".lower()
    for piece in question.expected:
        assert piece.lower() in document
        assert piece.lower() not in asked
