"""Prose of the repository, as a haystack and as real text."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
_SOURCES = (_ROOT / "examples" / "data" / "station_handbook.txt", _ROOT / "tools" / "peers" / "alice.txt")

CountTokens = Callable[[str], int]


@functools.cache
def prose() -> tuple[str, ...]:
    """All paragraphs, in the order of the texts; headings are left out."""
    blocks = (block.strip() for path in _SOURCES for block in path.read_text(encoding="utf-8").split("\n\n"))
    return tuple(block for block in blocks if len(block) > 100)


@functools.cache
def sentences() -> tuple[str, ...]:
    """The sentences of the prose, in order."""
    return tuple(s for block in prose() for s in split_sentences(block) if len(s) > 20)


def split_sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph, in order."""
    return re.split(r'(?<=[.!?])\s+(?=[A-Z"])', paragraph)


def haystack(rng: random.Random, needles: Sequence[str], num_tokens: int, count: CountTokens) -> str:
    """Consecutive sentences from a random place on, with the needles at random places among them.

    Args:
        rng: decides where the text begins and where the needles are.
        needles: whole sentences; their order is kept.
        num_tokens: the result is at most this long (the tokens of its sentences added up), and just about.
        count: tokens of a text.

    ValueError: the needles alone are too long.
    """
    room = num_tokens - sum(count(f" {needle}") for needle in needles)
    if room < 0:
        raise ValueError(f"num_tokens: got {num_tokens}; allowed: at least {num_tokens - room} for these needles")
    pool = sentences()
    first, hay = rng.randrange(len(pool)), list[str]()
    for i in range(first, first + num_tokens):
        sentence = pool[i % len(pool)]
        room -= count(f" {sentence}")
        if room < 0:
            break
        hay.append(sentence)
    places = sorted(rng.randrange(len(hay) + 1) for _ in needles)
    for offset, (place, needle) in enumerate(zip(places, needles, strict=True)):
        hay.insert(place + offset, needle)
    return " ".join(hay)
