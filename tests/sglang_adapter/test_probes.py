"""What passes append to a prefix."""

from __future__ import annotations

import itertools
import random
from unittest.mock import Mock

import pytest

from helpers.passes import Letters
from sgl_kvevict.cache.probes import (
    MAX_SENTENCE_TOKENS,
    MIN_SENTENCE_TOKENS,
    REPEAT,
    Probes,
    question_probes,
    repetition_probes,
    split_sentences,
)


def read(probes: Probes, *sizes: int) -> list[list[int]]:
    """Read probes to their end, with passes of these sizes in turn."""
    found = []
    for size in itertools.cycle(sizes):
        if probes.is_empty:
            return found
        found.append(probes.next(size))
        probes.was_read()
    raise AssertionError


def test_probes_are_cut_when_passes_start_and_questions_never():
    said = [token for probe in read(repetition_probes(None, list(range(50))), 20, 3, 1) for token in probe]
    assert said == list(range(50))
    encode = Letters().encode
    asked = [encode(f"{question}\n\n", False) for question in ("who", "where")]
    assert read(Probes(question_probes(Letters(), ["who", "where"])), 2) == asked


@pytest.mark.parametrize("pass_tokens", [16, 100, 1000])
def test_probes_repeat_every_sentence_once_in_another_order(pass_tokens):
    rng = random.Random(pass_tokens)
    tokens = [rng.randrange(12) for _ in range(700)]
    probes = read(repetition_probes(Letters(), tokens), pass_tokens)
    ask = Letters().encode(REPEAT + "\n\n", False)
    assert all(probe[: len(ask)] == ask for probe in probes)
    assert [len(probe) - len(ask) for probe in probes[:-1]] == [pass_tokens] * ((len(tokens) - 1) // pass_tokens)
    said = [token for probe in probes for token in probe[len(ask) :]]
    assert said != tokens
    rest = list(map(tuple, split_sentences(Letters(), tokens)))
    while said:
        sentence = next(s for s in sorted(rest, key=len, reverse=True) if tuple(said[: len(s)]) == s)
        rest.remove(sentence)
        said = said[len(sentence) :]
    assert not rest
    assert probes == read(repetition_probes(Letters(), tokens), pass_tokens)  # every rank asks the same


def test_sentences_end_at_full_stops_and_are_neither_short_nor_endless():
    stop = Letters.FULL_STOP
    short = [1] * (MIN_SENTENCE_TOKENS - 2) + [stop]
    whole = [2] * (MIN_SENTENCE_TOKENS - 1) + [stop]
    endless = [4] * (2 * MAX_SENTENCE_TOKENS + 5)
    assert split_sentences(Letters(), [*short, *whole, *whole, *endless, stop, 5]) == [
        [*short, *whole],
        whole,
        endless[:MAX_SENTENCE_TOKENS],
        endless[:MAX_SENTENCE_TOKENS],
        [4] * 5 + [stop, 5],
    ]


def test_a_real_tokenizer_s_sentences():
    """Full stops, line ends and their like within tokens, in a tokenizer that has such tokens."""
    tokenizer = Mock(decode=lambda ids: {1: ".\n", 2: "?", 3: "\u3002"}.get(ids[0], "word"))
    words = [9] * (MIN_SENTENCE_TOKENS - 1)
    for end in (1, 2, 3):
        assert split_sentences(tokenizer, [*words, end, *words]) == [[*words, end], words]


def test_without_a_tokenizer_a_prefix_is_repeated_without_words():
    assert read(repetition_probes(None, list(range(50))), 20) == [
        list(range(20)),
        list(range(20, 40)),
        list(range(40, 50)),
    ]
