"""Prepare contexts on a running server and ask their questions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvevict_quality.sample import Prompts, Question, Sample
from kvevict_tools.launcher import RunningServer
from kvevict_tools.measure import flush, plugin_state
from sgl_kvevict.client import warm

CONCURRENCY = 8
_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Prepared:
    """A context in the server's cache.

    Attributes:
        tokens: logical.
        slots: token slots held.
        seconds: until it was there, compressed.
    """

    tokens: int
    slots: int
    seconds: float


def prepare(server: RunningServer, context_ids: Sequence[int]) -> Prepared:
    """Empty the cache, then send a context alone, which compresses it.

    Args:
        server: stock, or with this plugin.
        context_ids: token ids.

    RuntimeError: the plugin did not compress it, although its budget is below 1.
    """
    flush(server)
    begin = time.perf_counter()
    if (state := plugin_state(server)) is None or state["policy"] == "none":
        generate(server, context_ids, 0)
        return Prepared(len(context_ids), len(context_ids), time.perf_counter() - begin)
    warm(server.url, input_ids=context_ids, timeout=_TIMEOUT_S)
    seconds = time.perf_counter() - begin
    state = plugin_state(server)
    assert state is not None
    if not state["spans"]:
        raise RuntimeError(f"a context of {len(context_ids)} tokens was not compressed: {state}")
    return Prepared(len(context_ids), int(state["evictable_slots"]), seconds)


def ask_all(server: RunningServer, prompts: Prompts, sample: Sample, context_ids: list[int]) -> list[str]:
    """The answers to all questions of a sample, several conversations at a time."""

    def converse(questions: Sequence[Question]) -> list[str]:
        ids, answers = list(context_ids), []
        for turn, question in enumerate(questions):
            ids += prompts.question_ids(sample, question, turn)
            output = generate(server, ids, question.max_new_tokens)
            answers.append(prompts.decode(output))
            ids += output
        return answers

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return [answer for answers in pool.map(converse, sample.conversations) for answer in answers]


def ask_aware(
    server: RunningServer, prompts: Prompts, sample: Sample, context_ids: list[int]
) -> tuple[list[str], Prepared]:
    """Answers to all questions of a sample, each in one prompt with the context, which is compressed before the answer.

    Every question gets a namespace of its own, so no prompt finds what was compressed for another question. Those of a
    conversation are asked alone.

    Args:
        server: with this plugin and without the overlap schedule, in which the first decode step may still read the
            uncompressed prompt. The first token of an answer comes from the prefill in any case.
        prompts: of its tokenizer.
        sample: context and questions.
        context_ids: token ids of the context.

    Returns answers, and what a prompt takes in the mean. RuntimeError: not every prompt was compressed.
    """
    flush(server)
    asked = [context_ids + prompts.question_ids(sample, question) for question in sample.questions]

    def answer(index: int) -> str:
        output = generate(server, asked[index], sample.questions[index].max_new_tokens, f"question {index}")
        return prompts.decode(output)

    begin = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(answer, range(len(asked))))
    seconds = time.perf_counter() - begin
    state = plugin_state(server)
    tokens = sum(map(len, asked))
    if state is None or state["span_tokens"] != tokens:
        raise RuntimeError(f"{len(asked)} prompts of {tokens} tokens were to be compressed, got {state}")
    return answers, Prepared(tokens // len(asked), int(state["span_slots"]) // len(asked), seconds)


def generate(server: RunningServer, ids: Sequence[int], max_new_tokens: int, namespace: str | None = None) -> list[int]:
    """Greedy continuation, without the token that ended it."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
    body = {"input_ids": list(ids), "sampling_params": sampling, "extra_key": namespace}
    reply = json.loads(server.post("/generate", body, _TIMEOUT_S))
    output = [int(token) for token in reply["output_ids"]]
    return output[:-1] if reply["meta_info"]["finish_reason"]["type"] == "stop" else output


Progress = Callable[[str], None]
