"""Questions that nobody here wrote: SQuAD, and fields of the World Factbook."""

from __future__ import annotations

import collections
import functools
import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvevict_quality import archives
from kvevict_quality.corpus import CountTokens
from kvevict_quality.sample import Question, Sample

_ASKED = 8
_BREAK_TOKENS = 2


@dataclass(frozen=True)
class ShortAnswer(Question):
    """A question of SQuAD; ``variants`` are the other right answers. The output counts up to a quotation mark."""

    def score(self, output: str) -> float:
        """F1 of the words that the output shares with the right answer that it is closest to."""
        return max(self._f1(_words(_quoted(output)), _words(answer)) for answer in (*self.answers, *self.variants))

    def exact(self, output: str) -> float:
        """1 if the output is a right answer, apart from case, punctuation and articles."""
        return float(any(_words(_quoted(output)) == _words(answer) for answer in (*self.answers, *self.variants)))

    @staticmethod
    def _f1(output: list[str], answer: list[str]) -> float:
        common = (collections.Counter(output) & collections.Counter(answer)).total()
        return 2 * common / (len(output) + len(answer)) if common else float(output == answer)


def _quoted(output: str) -> str:
    return re.split(r'["\n]', output)[0]


def _words(text: str) -> list[str]:
    """Words as SQuAD's ``evaluate-v1.1.py`` compares them."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def squad(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Paragraphs drawn at random, and questions about them."""
    paragraphs = rng.sample(_paragraphs(), len(_paragraphs()))
    chosen: list[dict[str, Any]] = []
    for paragraph in paragraphs:
        num_tokens -= count(paragraph["context"]) + _BREAK_TOKENS
        if num_tokens < 0:
            break
        chosen.append(paragraph)
    if not chosen:
        raise ValueError("num_tokens: too few for one paragraph")
    asked = [question for paragraph in chosen for question in paragraph["qas"]]
    questions = (
        ShortAnswer(
            given["question"],
            'According to the text, the answer is "',
            (given["answers"][0]["text"],),
            24,
            tuple(answer["text"] for answer in given["answers"][1:]),
        )
        for given in rng.sample(asked, min(_ASKED, len(asked)))
    )
    return Sample("\n\n".join(paragraph["context"] for paragraph in chosen), tuple(questions))


@functools.cache
def _paragraphs() -> tuple[dict[str, Any], ...]:
    return archives.squad_paragraphs()


def factbook(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Consecutive fields of a country's profile; numbers that stand there once are asked for."""
    profiles = _profiles()
    for name in rng.sample(sorted(profiles), len(profiles)):
        fields = profiles[name]
        lengths = [count(f"{label}: {text}\n") for label, text in fields]
        room, first = num_tokens, rng.randrange(len(fields) // 2 if sum(lengths) > 2 * num_tokens else 1)
        end = first
        while end < len(fields) and room >= lengths[end]:
            room -= lengths[end]
            end += 1
        context = "\n".join(f"{label}: {text}" for label, text in fields[first:end])
        asked = [(label, value) for label, text in fields[first:end] if (value := _number(text, context))]
        if room < num_tokens // 8 and len(asked) >= _ASKED:
            break
    else:
        raise ValueError(f"num_tokens: got {num_tokens}; allowed: what one profile fills")
    questions = (
        Question(f"What is written here for {label}?", f"{label}:", (value,), 16)
        for label, value in rng.sample(asked, _ASKED)
    )
    return Sample(context, tuple(questions))


def _number(text: str, context: str) -> str:
    """The number that a field begins with, if it is one of several digits and the context has it once; else empty."""
    found = re.match(r"\$?(\d[\d,.]*\d)", text)
    return found[1] if found and len(re.findall(rf"(?<![\d,.]){re.escape(found[1])}(?![\d])", context)) == 1 else ""


@functools.cache
def _profiles() -> dict[str, tuple[tuple[str, str], ...]]:
    """(label, text) of all fields of each country, in order; labels of two fields that are alike are left out."""
    profiles = {}
    for name, profile in archives.country_profiles().items():
        fields = list(_fields(profile, ()))
        times = collections.Counter(label for label, _ in fields)
        profiles[name] = tuple((label, text) for label, text in fields if times[label] == 1)
    return profiles


def _fields(node: dict[str, Any], above: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name, inner in node.items():
        if isinstance(inner, dict):
            path = (*above, name)
            if isinstance(inner.get("text"), str):
                yield ", ".join(path[1:] or path), inner["text"].replace("\n", " ").strip()
            yield from _fields(inner, path)
