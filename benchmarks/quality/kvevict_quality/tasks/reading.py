"""Questions about real prose, each answered by a few words of one paragraph of it.

They stand in ``reading.jsonl`` in the order of the texts, one JSON object a line:

* ``passage``: first words of the one paragraph of ``corpus.prose`` that answers the question
* ``question``
* ``lead``: first words of a sentence that answers it, put into the assistant's mouth
* ``answer``: words of that paragraph, as they stand there
* ``variants``: other forms of the answer that count too, such as figures for a number; may be empty
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvevict_quality.corpus import CountTokens, prose, split_sentences
from kvevict_quality.sample import SAMPLES_INDEX, Question, Sample

QUESTIONS = Path(__file__).with_name("reading.jsonl")
ASKED = 8
#: A context asks every so-manyth question of a stretch of text, so that they are about several paragraphs.
STRIDE = 3
_ANSWER_TOKENS = 12
#: Between two paragraphs.
_BREAK_TOKENS = 2


@dataclass(frozen=True)
class Entry:
    """A question, and the index in ``corpus.prose`` of the paragraph that answers it."""

    paragraph: int
    question: Question


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All questions, in the order of the texts.

    ValueError: a passage that is the beginning of no paragraph, or of several.
    """
    found = []
    for number, line in enumerate(QUESTIONS.read_text(encoding="utf-8").splitlines(), start=1):
        given = json.loads(line)
        paragraphs = [i for i, text in enumerate(prose()) if text.startswith(given["passage"])]
        if len(paragraphs) != 1:
            raise ValueError(
                f"passage, line {number} of {QUESTIONS.name}: got {given['passage']!r}, with which {len(paragraphs)} "
                "paragraphs begin; allowed: the first words of one"
            )
        forms = (given["answer"],), _ANSWER_TOKENS, tuple(given["variants"])
        found.append(Entry(paragraphs[0], Question(given["question"], given["lead"], *forms)))
    return tuple(found)


def reading(rng: random.Random, num_tokens: int, count: CountTokens, seed: int, index: int) -> Sample:
    """Consecutive paragraphs with eight questions about them.

    The contexts of a run ask every question once before any is asked again, but for eight: those are sample questions,
    which are given to the system ``questions``. No paragraph stands in a context twice, so a context is never longer
    than both texts (about 4,000 tokens).

    Args:
        rng: decides how much text stands before the paragraphs that the questions are about.
        num_tokens: the context is at most this long.
        count: tokens of a text.
        seed: of the run; decides the order in which questions are asked.
        index: of the context in the run, or ``SAMPLES_INDEX``.

    ValueError: no room for the paragraphs that the questions are about.
    """
    asked = _asked(seed, index)
    text = _around(rng, asked[0].paragraph, asked[-1].paragraph, num_tokens, count)
    return Sample(text, tuple(entry.question for entry in asked))


def _asked(seed: int, index: int) -> Sequence[Entry]:
    groups = len(entries()) // ASKED
    order = random.Random(seed).sample(range(groups), groups)
    block, first = divmod(order[-1] if index == SAMPLES_INDEX else order[index % (groups - 1)], STRIDE)
    size = ASKED * STRIDE
    return entries()[block * size : (block + 1) * size][first::STRIDE]


def _around(rng: random.Random, first: int, last: int, num_tokens: int, count: CountTokens) -> str:
    """These paragraphs with some before and after them; the first text follows the last one."""
    texts = prose()
    room = num_tokens - sum(count(text) + _BREAK_TOKENS for text in texts[first : last + 1])
    if room < 0:
        raise ValueError(f"num_tokens: got {num_tokens}; allowed: at least {num_tokens - room} for these questions")
    others = [*texts[last + 1 :], *texts[:first]]
    lengths = [count(text) + _BREAK_TOKENS for text in others]
    fitting = sum(length <= room for length in itertools.accumulate(reversed(lengths)))
    cut = len(others) - rng.randint(0, fitting)
    after = _beginning(others[:cut], room - sum(lengths[cut:]), count)
    return "\n\n".join([*others[cut:], *texts[first : last + 1], *after])


def _beginning(paragraphs: Sequence[str], room: int, count: CountTokens) -> list[str]:
    """Whole sentences from the first paragraph on, as many as there is room for."""
    found: list[str] = []
    for paragraph in paragraphs:
        room -= _BREAK_TOKENS
        kept: list[str] = []
        for sentence in split_sentences(paragraph):
            room -= count(f" {sentence}")
            if room >= 0:
                kept.append(sentence)
        if kept:
            found.append(" ".join(kept))
    return found
