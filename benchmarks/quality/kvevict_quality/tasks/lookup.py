"""Look-ups in structured text: keys and values in JSON, rows of a table, and constants in code."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvevict_quality.corpus import CountTokens, sentences
from kvevict_quality.sample import Question, Sample
from kvevict_quality.tasks.needles import number
from kvevict_quality.tasks.wordlists import CITIES, FRUITS, NAMES, NOUNS

_ASKED = 8


def _records(
    rng: random.Random, num_tokens: int, count: CountTokens, form: Callable[[str, str, str], str]
) -> tuple[str, dict[str, str]]:
    """Eight records in the given form, made of (key, value, prose); the prose fills the room. And key to value."""
    values = {key: number(rng, 5) for key in rng.sample(NOUNS, _ASKED)}
    pool, place = sentences(), rng.randrange(len(sentences()))
    parts: list[str] = []
    room = num_tokens
    for left, (key, value) in zip(range(_ASKED, 0, -1), values.items(), strict=True):
        prose, share = "", room // left
        while True:
            longer = f"{prose} {pool[place % len(pool)]}".strip().replace('"', "'")
            if count(form(key, value, longer)) + 2 > share:
                break
            prose, place = longer, place + 1
        parts.append(form(key, value, prose))
        room -= count(parts[-1]) + 2
    return "\n".join(parts), values


def key_value(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Lines of JSON, each with a key, its value and a note; every value is asked for."""
    text, values = _records(rng, num_tokens, count, lambda k, v, prose: f'{{"note": "{prose}", "{k}": "{v}"}}')
    questions = (
        Question(f'What is the value of the key "{key}"?', f'"{key}": "', (value,), 6) for key, value in values.items()
    )
    return Sample(text, tuple(questions))


def table(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Eight rows, tabs between town, fruit, person and a note that fills the room; the fruits are asked for."""
    towns = rng.sample(CITIES, _ASKED)
    fruits = dict(zip(towns, rng.sample(FRUITS, _ASKED), strict=True))
    head = "town\tfruit\tperson\tnote"
    rows = [f"{town}\t{fruit}\t{rng.choice(NAMES)}\t" for town, fruit in fruits.items()]
    room = num_tokens - count(head) - sum(count(f"\n{row}") for row in rows)
    pool, place = sentences(), rng.randrange(len(sentences()))
    while room >= 0:
        note = f" {pool[place % len(pool)]}"
        room -= count(note)
        if room >= 0:
            rows[place % len(rows)] += note
        place += 1
    questions = (Question(f"Which fruit is in the row of {town}?", f"{town}\t", (fruits[town],), 3) for town in towns)
    return Sample("\n".join((head, *rows)), tuple(questions))


def code(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """A module of functions that return numbers, with comments; what each returns is asked for."""

    def form(key: str, value: str, prose: str) -> str:
        return f"# {prose}\ndef {key}_limit():\n    return {value}\n"

    text, values = _records(rng, num_tokens - 8, count, form)
    questions = (
        Question(f"What does {key}_limit() return?", f"```python\ndef {key}_limit():\n    return", (value,), 6)
        for key, value in values.items()
    )
    return Sample(f"```python\n{text}```", tuple(questions))
