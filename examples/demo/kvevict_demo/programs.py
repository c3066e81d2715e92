"""The two programs that every system runs: a forked frontend program and a multi-turn chat."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .questions import Question

BRANCH_TOKENS = 12
CHAT_TOKENS = 24
#: Turns system message, user message and lead into exactly what the model's own template gives.
CHAT_TEMPLATE = "chatml"


@dataclass(frozen=True)
class Answer:
    """One answer of a program.

    Attributes:
        text: the words of the model (without the lead).
        right: whether they hold the expected fact.
        cached_tokens: prompt tokens that the server did not have to compute.
        started, finished: wall clock of the server's work on it, seconds since the epoch.
        ttft_s: seconds until the first word arrived; None where the program does not stream.
    """

    text: str
    right: bool
    cached_tokens: int
    started: float
    finished: float
    ttft_s: float | None = None


def max_overlap(answers: Sequence[Answer]) -> int:
    """The largest number of answers that the server worked on at one moment."""
    return max((sum(a.started <= b.started < a.finished for a in answers) for b in answers), default=0)


def run_branches(url: str, prompt: str, questions: Sequence[Question], on_cached: Callable[[], None]) -> list[Answer]:
    """Ask all ``questions`` about one cached prefix at once, in a frontend program with ``fork``.

    Args:
        url: address of the server.
        prompt: the system message that all branches share.
        questions: one branch each.
        on_cached: called when ``fork`` has cached the shared prefix and no branch has started yet.
    """
    sgl = _import_frontend()

    @sgl.function  # type: ignore[untyped-decorator]  # SGLang has no type information
    def ask_handbook(s: Any, system: str) -> Any:
        s += sgl.system(system)
        s.sync()  # fork looks at the text at once, and caches it only if it is already there
        forks = s.fork(len(questions))
        try:
            on_cached()
            for fork, question in zip(forks, questions, strict=True):
                fork += sgl.user(question.text)
                fork += sgl.assistant(question.lead + sgl.gen("answer", max_tokens=BRANCH_TOKENS, temperature=0))
            return [_branch_result(fork) for fork in forks]
        finally:
            forks.join()  # ends the threads of the branches; without it the interpreter never exits

    sgl.set_default_backend(sgl.RuntimeEndpoint(url, chat_template_name=CHAT_TEMPLATE))
    results = ask_handbook.run(system=prompt).ret_value
    return [_branch_answer(q, text, meta) for q, (text, meta) in zip(questions, results, strict=True)]


def _import_frontend() -> Any:
    with warnings.catch_warnings():
        # torchvision warns about image codecs that nothing here uses.
        warnings.simplefilter("ignore")
        import sglang
    return sglang


def _branch_result(fork: Any) -> tuple[str, dict[str, Any]]:
    error = fork.error()  # waits for the branch; the frontend keeps a failure instead of raising it
    if error is not None:
        raise error
    return fork["answer"], fork.get_meta_info("answer")


def _branch_answer(question: Question, text: str, meta: dict[str, Any]) -> Answer:
    return Answer(
        text=text.strip(),
        right=question.is_right(text),
        cached_tokens=int(meta["cached_tokens"]),
        started=float(meta["forward_entry_time"]),
        finished=float(meta["request_finished_ts"]),
    )


def run_chat(url: str, prompt: str, questions: Sequence[Question]) -> list[Answer]:
    """One conversation over the OpenAI-compatible API: each turn carries the whole history."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages: list[Any] = [{"role": "system", "content": prompt}]
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question.text})
        answer = _chat_turn(client, messages, question)
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
    return answers


def _chat_turn(client: Any, messages: list[Any], question: Question) -> Answer:
    started = time.time()
    first_word = None
    text, cached = "", 0
    stream = client.chat.completions.create(
        model="default",
        messages=messages,
        max_tokens=CHAT_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first_word = first_word or time.time()
            text += chunk.choices[0].delta.content
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            cached = int(chunk.usage.prompt_tokens_details.cached_tokens or 0)
    if first_word is None:
        raise RuntimeError(f"the server sent no text for {question.text!r}")
    return Answer(
        text=text.strip(),
        right=question.is_right(text),
        cached_tokens=cached,
        started=started,
        finished=time.time(),
        ttft_s=first_word - started,
    )
