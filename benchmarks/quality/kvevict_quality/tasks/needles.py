"""Needles in prose, after RULER (arXiv 2404.06654): single, multi-key, multi-value, multi-query."""

from __future__ import annotations

import random

from kvevict_quality.corpus import CountTokens, haystack
from kvevict_quality.sample import Question, Sample
from kvevict_quality.tasks.wordlists import CITIES, FRUITS, NAMES, PLACES


def number(rng: random.Random, digits: int = 6) -> str:
    """A number without leading zero."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def _needle(key: str, value: str) -> str:
    return f"The telephone number of {key} is {value}."


def _values(rng: random.Random, count: int) -> dict[str, str]:
    """So many keys of one kind, each with a value."""
    return {key: number(rng) for key in rng.sample(PLACES, count)}


def single(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Six facts of six kinds."""
    city, other, third = rng.sample(CITIES, 3)
    facts = [
        (f"The special magic number for {city} is:", number(rng, 7), f"What is the special magic number for {city}?"),
        (f"The secret password of {other} is:", rng.choice(FRUITS), f"What is the secret password of {other}?"),
        ("The telephone number of the bakery is:", number(rng), "What is the telephone number of the bakery?"),
        ("The code of the blue locker is:", number(rng, 5), "What is the code of the blue locker?"),
        (f"The bridge of {third} was opened in the year", number(rng, 4), f"When was the bridge of {third} opened?"),
        ("The dentist's best friend is called", rng.choice(NAMES), "Who is the dentist's best friend?"),
    ]
    rng.shuffle(facts)
    text = haystack(rng, [f"{lead} {value}." for lead, value, _ in facts], num_tokens, count)
    return Sample(text, tuple(Question(ask, lead, (value,), 9) for lead, value, ask in facts))


def multi_key(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Six keys of one kind, each with its value; every one is asked for, the others distract."""
    values = _values(rng, 6)
    text = haystack(rng, [_needle(*item) for item in values.items()], num_tokens, count)
    questions = (
        Question(f"What is the telephone number of {key}?", f"The telephone number of {key} is", (value,), 8)
        for key, value in values.items()
    )
    return Sample(text, tuple(questions))


def multi_value(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Six keys with two values each; a question asks for both."""
    values = {key: (number(rng, 5), number(rng, 5)) for key in rng.sample(PLACES, 6)}
    needles = [
        f"The two telephone numbers of {key} are {first} and {second}." for key, (first, second) in values.items()
    ]
    questions = (
        Question(f"What are the two telephone numbers of {key}?", f"The two telephone numbers of {key} are", both, 16)
        for key, both in values.items()
    )
    return Sample(haystack(rng, needles, num_tokens, count), tuple(questions))


def multi_query(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Three keys; a question asks for two of them at once."""
    values = _values(rng, 3)
    keys = list(values)
    text = haystack(rng, [_needle(*item) for item in values.items()], num_tokens, count)
    questions = []
    for a, b in zip(keys, keys[1:] + keys[:1], strict=True):
        ask = f"What is the telephone number of {a}, and what is the telephone number of {b}?"
        questions.append(Question(ask, f"The telephone number of {a} is", (values[a], values[b]), 28))
    return Sample(text, tuple(questions))
