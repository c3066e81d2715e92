"""Questions about cached prefixes, each answer as it is generated."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from .questions import Question, system_prompt

ANSWER_TOKENS = 12


@dataclass
class Streamed:
    """An answer while it is generated.

    Attributes:
        question: what was asked.
        text: the words generated so far, without the question's lead.
        meta: what the server tells beside the text: tokens of the prompt, found in the cache, compressed meanwhile.
    """

    question: Question
    text: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether the text holds the expected fact."""
        return self.question.is_right(self.text)


def prefix_text() -> str:
    """The document as a system message in the demo model's chat template: the prefix that all questions share."""
    return f"<|im_start|>system\n{system_prompt()}<|im_end|>\n"


def question_text(question: Question) -> str:
    """A user's turn, and the beginning of the assistant's."""
    return f"<|im_start|>user\n{question.text}<|im_end|>\n<|im_start|>assistant\n{question.lead}"


def ask_all(url: str, questions: Sequence[Question], on_word: Callable[[Sequence[Streamed]], None]) -> list[Streamed]:
    """Ask all questions at the same time, streamed.

    Args:
        url: address of the server.
        questions: one request each, all with the same prefix.
        on_word: called with all answers whenever one of them has grown; from several threads.

    Raises:
        OSError: the server is gone, or refused a request.
    """
    answers = [Streamed(question) for question in questions]
    with ThreadPoolExecutor(len(answers)) as pool:
        list(pool.map(lambda answer: ask(url, prefix_text(), answer, lambda: on_word(answers)), answers))
    return answers


def ask(url: str, prefix: str, answer: Streamed, on_word: Callable[[], None] = lambda: None) -> None:
    """Ask one question behind a prefix; ``answer`` grows with every word.

    Raises:
        OSError: the server is gone, or refused the request.
    """
    body = {
        "text": prefix + question_text(answer.question),
        "sampling_params": {"max_new_tokens": ANSWER_TOKENS, "temperature": 0},
        "stream": True,
    }
    for chunk in _stream(f"{url}/generate", body):
        answer.text = " ".join(chunk["text"].split())
        answer.meta = chunk["meta_info"]
        on_word()


def _stream(url: str, body: dict[str, Any]) -> Any:
    """Decoded server-sent events of a streamed request."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            text = line.decode().strip()
            if text.startswith("data: ") and text != "data: [DONE]":
                yield json.loads(text.removeprefix("data: "))
