"""Documents of four times the pool: how many fit, how many requests a second are answered, and how many find theirs."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvevict_tools.launcher import RunningServer
from kvevict_tools.measure import flush, idle_gauges

from .questions import DOCUMENT

WORKING_SET = 4
"""Tokens of all documents, in pools."""
DOCUMENT_WORDS = 700
REQUESTS_PER_ROUND = 6
ANSWER_TOKENS = 8
CONCURRENCY = 2
FOUND_SHARE = 0.9
"""A request found its document if so much of its prompt was cached."""


def documents() -> Iterator[str]:
    """Prompts that begin with different words and go on with the handbook's, from different places."""
    words = DOCUMENT.read_text(encoding="utf-8").split()
    number = 0
    while True:
        number += 1
        start = number * 397 % len(words)
        text = " ".join((words[start:] + words[:start])[:DOCUMENT_WORDS])
        yield f"<|im_start|>system\nDocument {number}. {text}<|im_end|>\n"


@dataclass(frozen=True)
class Shown:
    """The documents as one server has seen them.

    Attributes:
        texts: prompts.
        tokens: of all of them together.
        slots_each: token slots that the cache held for the first one.
    """

    texts: tuple[str, ...]
    tokens: int
    slots_each: int


def show_documents(server: RunningServer, pool_slots: int) -> Shown:
    """Cache one document after the other in an empty cache, until they are ``WORKING_SET`` times the pool."""
    flush(server)
    empty = idle_gauges(server).evictable
    texts: list[str] = []
    tokens = slots_each = 0
    for text in documents():
        tokens += _generate(server, text, 0)["prompt_tokens"]
        texts.append(text)
        slots_each = slots_each or idle_gauges(server).evictable - empty
        if tokens >= WORKING_SET * pool_slots:
            return Shown(tuple(texts), tokens, slots_each)
    raise AssertionError("documents() never ends")


def ask(server: RunningServer, shown: Shown, number: int) -> tuple[float, float]:
    """One round of new questions on documents drawn at random, the same ones for every system.

    Returns:
        answered requests per second, and the share of requests that found their document in the cache.
    """
    texts = random.Random(number).sample(shown.texts, REQUESTS_PER_ROUND)
    prompts = [
        f"{text}<|im_start|>user\nQuestion {number}: what is told here?<|im_end|>\n<|im_start|>assistant\n"
        for text in texts
    ]
    started = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        metas = list(pool.map(lambda prompt: _generate(server, prompt, ANSWER_TOKENS), prompts))
    seconds = time.perf_counter() - started
    found = sum(meta["cached_tokens"] >= FOUND_SHARE * meta["prompt_tokens"] for meta in metas)
    return len(prompts) / seconds, found / len(prompts)


def _generate(server: RunningServer, text: str, max_new_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    answer: dict[str, Any] = json.loads(server.post("/generate", {"text": text, "sampling_params": sampling}))
    meta: dict[str, Any] = answer["meta_info"]
    return meta
