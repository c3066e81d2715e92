"""What a model reads after a text: its sentences, in another order."""

from __future__ import annotations

import random
from unittest.mock import Mock

import pytest

from helpers.scheduling import Letters
from sgl_kvevict.distill.texts import MAX_SENTENCE_TOKENS, MIN_SENTENCE_TOKENS, REPEAT, repetitions, split_sentences


@pytest.mark.parametrize("part_tokens", [16, 100, 1000])
def test_every_sentence_is_repeated_once_in_another_order(part_tokens):
    rng = random.Random(part_tokens)
    tokens = [rng.randrange(12) for _ in range(700)]
    parts = repetitions(Letters(), tokens, part_tokens)
    ask = Letters().encode(REPEAT + "\n\n", False)
    assert all(part[: len(ask)] == ask for part in parts)
    assert [len(part) - len(ask) for part in parts[:-1]] == [part_tokens] * ((len(tokens) - 1) // part_tokens)
    said = [token for part in parts for token in part[len(ask) :]]
    assert said != tokens
    rest = list(map(tuple, split_sentences(Letters(), tokens)))
    while said:
        sentence = next(s for s in sorted(rest, key=len, reverse=True) if tuple(said[: len(s)]) == s)
        rest.remove(sentence)
        said = said[len(sentence) :]
    assert not rest
    assert parts == repetitions(Letters(), tokens, part_tokens)  # every rank reads the same


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
