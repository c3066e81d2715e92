"""Questions about cached prefixes, each answer as it is generated."""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from kvevict_tools.launcher import RunningServer

from .questions import Question, system_prompt

ANSWER_TOKENS = 12
HELD_TOKENS = 64
"""Tokens that a request generates which is to read a prompt for a while: two seconds or more."""
Options = Mapping[str, Any]
"""Of a request: what it has under ``kvevict`` in its custom parameters."""
EXACT: Options = {"exact": True}
"""Read nothing compressed."""
COMPLETE: Options = {"complete": True}
"""Read every entry, so take back what was evicted."""


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


def ask_all(
    url: str,
    questions: Sequence[Question],
    on_word: Callable[[Sequence[Streamed]], None],
    *,
    prefix_tokens: int,
    options: Options = MappingProxyType({}),
) -> list[Streamed]:
    """Ask all questions about the document at the same time, streamed.

    Args:
        url: address of the server.
        questions: one request each, all with the same prefix.
        on_word: called with all answers whenever one of them has grown; from several threads.
        prefix_tokens: length of the document's part of the prompts. What follows is computed even if it is cached,
            because the same question may have been computed behind another size of the document.
        options: of all requests.

    Raises:
        OSError: the server is gone, or refused a request.
    """
    answers = [Streamed(question) for question in questions]
    anew = {"return_logprob": True, "logprob_start_len": prefix_tokens}  # SGLang matches no token from there on
    with ThreadPoolExecutor(len(answers)) as pool:
        ask_one = partial(ask, url, prefix_text(), on_word=lambda: on_word(answers), options=options, fields=anew)
        list(pool.map(ask_one, answers))
    return answers


def ask(
    url: str,
    prefix: str,
    answer: Streamed,
    on_word: Callable[[], None] = lambda: None,
    *,
    options: Options = MappingProxyType({}),
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Ask one question behind a prefix; ``answer`` grows with every word. ``fields``: further ones of the request.

    Raises:
        OSError: the server is gone, or refused the request.
    """
    body = {
        "text": prefix + question_text(answer.question),
        "sampling_params": {"max_new_tokens": ANSWER_TOKENS, "temperature": 0, **_custom(options)},
        "stream": True,
        **fields,
    }
    for chunk in _stream(f"{url}/generate", body):
        answer.text = " ".join(chunk["text"].split())
        answer.meta = chunk["meta_info"]
        on_word()


@contextmanager
def reading(server: RunningServer, prompt: str, *, options: Options = MappingProxyType({})) -> Iterator[dict[str, Any]]:
    """Have a request read a prompt while the block runs.

    Yields its answer as SGLang sends it (``text``, ``meta_info``), at first with one token, after the block with all.

    Raises:
        OSError: the server is gone, or refused the request.
    """
    name = secrets.token_hex(8)
    sampling = {"max_new_tokens": HELD_TOKENS, "ignore_eos": True, "temperature": 0, **_custom(options)}
    parts = _stream(
        f"{server.url}/generate", {"rid": name, "text": prompt, "sampling_params": sampling, "stream": True}
    )
    answer = next(parts)
    yield answer
    server.post("/abort_request", {"rid": name})
    for part in parts:  # to its end: only then no token of it is computed any more
        answer.update(part)


def _custom(options: Options) -> dict[str, Any]:
    """Sampling parameters of a request with options."""
    return {"custom_params": {"kvevict": dict(options)}} if options else {}


def _stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Decoded server-sent events of a streamed request."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            text = line.decode().strip()
            if text.startswith("data: ") and text != "data: [DONE]":
                yield json.loads(text.removeprefix("data: "))
