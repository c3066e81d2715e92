"""Word counting, after RULER: the common words of a list, and the frequent words of a coded text."""

from __future__ import annotations

import random
from collections import Counter

from kvevict_quality.corpus import CountTokens, sentences
from kvevict_quality.sample import Question, Sample

_LISTS = 4


def _words() -> list[str]:
    """Words of the prose with 4 to 8 letters, each once, in order."""
    found = (word.strip('.,;:!?"()').lower() for sentence in sentences() for word in sentence.split())
    return list(dict.fromkeys(word for word in found if word.isalpha() and 4 <= len(word) <= 8))


def common_words(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Four lists of words; in each, three words come often and the others once."""
    pool = _words()
    rng.shuffle(pool)
    lists, questions = [], []
    for name in range(1, _LISTS + 1):
        common = tuple(pool.pop() for _ in range(3))
        room = num_tokens // _LISTS - 12
        words = [word for word in common for _ in range(room // 40)]
        room -= sum(count(f", {word}") for word in words)
        for word in rng.sample(pool, len(pool)):
            room -= count(f", {word}")
            if room < 0:
                break
            words.append(word)
        rng.shuffle(words)
        lists.append(f"List {name}: {', '.join(words)}.")
        questions.append(_question("List", name, common))
    return Sample("\n\n".join(lists), tuple(questions))


def frequent_words(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Four texts of made-up words, whose frequency falls like Zipf's law; the first three are asked for."""
    made = _made_up(rng, 40 * _LISTS)
    weights = [(rank + 1) ** -1.6 for rank in range(40)]
    texts, questions = [], []
    for name in range(1, _LISTS + 1):
        words, text = made[40 * (name - 1) : 40 * name], list[str]()
        room = num_tokens // _LISTS - 12
        while room >= 0:
            text += rng.choices(words, weights)
            room -= count(f" {text[-1]}")
        texts.append(f"Coded text {name}: {' '.join(text[:-1])}.")
        top = [word for word, _ in Counter(text[:-1]).most_common(3)]
        questions.append(_question("Coded text", name, tuple(top)))
    return Sample("\n\n".join(texts), tuple(questions))


def _made_up(rng: random.Random, number: int) -> list[str]:
    """Different words of three syllables."""
    words: dict[str, None] = {}
    while len(words) < number:
        words["".join(rng.choice("bcdfghklmnprstvw") + rng.choice("aeiou") for _ in range(3))] = None
    return list(words)


def _question(kind: str, name: int, answers: tuple[str, ...]) -> Question:
    ask = f"Which three words appear most often in {kind} {name}?"
    return Question(ask, f"The three words that appear most often in {kind} {name} are:", answers, 24)
