"""Contexts with needles and questions about them (``benchmarks/quality``), asked over HTTP by several clients."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from kvevict_quality.sample import Prompts, Question, Sample
from kvevict_quality.tasks import make_sample

TASKS = ("needle-single", "needle-multi-key")
"""Of the needle tasks, those that the demo model answers best with its full cache."""
SEED = 17


@dataclass(frozen=True)
class Answered:
    """One answered question.

    Attributes:
        score: share of the values asked for that the answer contains.
        prompt_tokens, cached_tokens: as the server counted them.
        seconds: from sending it to the whole answer.
    """

    score: float
    prompt_tokens: int
    cached_tokens: int
    seconds: float


@dataclass(frozen=True)
class Context:
    """A context as token ids, and its questions."""

    ids: list[int]
    sample: Sample


Asked = tuple[Context, Question]


class Needles:
    """Makes contexts and asks about them.

    Args:
        model: folder with the tokenizer.
        tokens: of a context that is made here, at most, chat template included.
    """

    def __init__(self, model: Path, tokens: int = 0) -> None:
        from transformers import AutoTokenizer

        self.prompts = Prompts(AutoTokenizer.from_pretrained(model))
        self._tokens = tokens

    def contexts(self, count: int, first: int) -> list[Context]:
        """So many contexts, the tasks in turn; ``first``: index of the first one, contexts of one index are equal."""
        found = []
        for index in range(first, first + count):
            sample = make_sample(TASKS[index % len(TASKS)], self._tokens, SEED, index, self.prompts.count)
            found.append(Context(self.prompts.context_ids(sample), sample))
        return found

    def ask(self, url: str, asked: Sequence[Asked], concurrency: int) -> tuple[list[Answered], float]:
        """Ask questions in order, a few at a time; returns the answers and the seconds that all of them took.

        aiohttp.ClientResponseError: the server refused one.
        """
        return asyncio.run(self._ask_all(url, asked, concurrency))

    async def _ask_all(self, url: str, asked: Sequence[Asked], concurrency: int) -> tuple[list[Answered], float]:
        gate = asyncio.Semaphore(concurrency)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:

            async def one(context: Context, question: Question) -> Answered:
                async with gate:
                    return await self._ask(session, url, context, question)

            begin = time.perf_counter()
            answers = await asyncio.gather(*(one(*pair) for pair in asked))
            return answers, time.perf_counter() - begin

    async def _ask(self, session: aiohttp.ClientSession, url: str, context: Context, question: Question) -> Answered:
        ids = [*context.ids, *self.prompts.question_ids(context.sample, question)]
        body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": question.max_new_tokens}}
        begin = time.perf_counter()
        async with session.post(f"{url}/generate", json=body) as response:
            response.raise_for_status()
            reply: dict[str, Any] = await response.json()
        meta = reply["meta_info"]
        score = question.score(self.prompts.decode(reply["output_ids"]))
        return Answered(score, int(meta["prompt_tokens"]), int(meta["cached_tokens"]), time.perf_counter() - begin)


def rounds(contexts: Sequence[Context], sizes: Sequence[int]) -> list[list[Asked]]:
    """Questions of rounds: every context once before any comes again, in random order, the next question each.

    Args:
        contexts: that are asked about.
        sizes: questions of each round.
    """
    chooser = random.Random(SEED)
    order: list[int] = []
    times = [0] * len(contexts)
    found = []
    for size in sizes:
        asked = []
        for _ in range(size):
            order = order or chooser.sample(range(len(contexts)), len(contexts))
            index = order.pop()
            questions = contexts[index].sample.questions
            asked.append((contexts[index], questions[times[index] % len(questions)]))
            times[index] += 1
        found.append(asked)
    return found


def figures(answers: Sequence[Answered], seconds: float) -> dict[str, float]:
    """What a round showed."""
    return {
        "requests_per_s": len(answers) / seconds,
        "hit_rate_pct": 100 * sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers),
        "needle_score": sum(a.score for a in answers) / len(answers),
        "answer_s": sorted(a.seconds for a in answers)[len(answers) // 2],
    }
