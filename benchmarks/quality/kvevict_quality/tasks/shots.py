"""Many exchanges of a chat: sentences with their class, lists and the item that a rule picks, questions asked again."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvevict_quality.corpus import CountTokens, sentences
from kvevict_quality.sample import Question, Sample
from kvevict_quality.tasks.needles import number
from kvevict_quality.tasks.wordlists import ANIMALS, CITIES, FRUITS, NAMES, NOUNS, PLACES

_ASKED = 8
#: Classes and the words that give a sentence its class.
_CLASSES = {"fruit": FRUITS, "city": CITIES, "animal": ANIMALS}
_SENTENCES = (
    "{name} could not stop talking about the {word}.",
    "Last week {name} wrote a letter about the {word}.",
    "There is a picture of the {word} above {name}'s desk.",
    "{name} asked me what I think of the {word}.",
    "On Monday {name} told the children a story of the {word}.",
)
_REPLIES = ("I see.", "Go on.", "That is interesting.", "What happened then?")
#: Of the chat template around both messages of an exchange.
_EXCHANGE_TOKENS = 12

Exchange = tuple[str, str]


def few_shot(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Sentences answered by their class; those of further sentences are asked for."""
    new = [(kind, rng.choice(words)) for kind, words in _CLASSES.items() for _ in range(3)][:_ASKED]
    taken = {word for _, word in new}

    def sentence(word: str) -> str:
        return rng.choice(_SENTENCES).format(name=rng.choice(NAMES), word=word)

    def draw() -> Exchange:
        kind = rng.choice(list(_CLASSES))
        return sentence(rng.choice([word for word in _CLASSES[kind] if word not in taken])), f"Class: {kind}"

    history = _fill(num_tokens, count, draw)
    asked = {sentence(word): kind for kind, word in new}
    return Sample("", tuple(Question(text, "Class:", (kind,), 4) for text, kind in asked.items()), history)


def pattern(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Lists of three words, each answered by its last word; further lists are asked."""

    def words() -> list[str]:
        return rng.sample(NOUNS, 3)

    def draw() -> Exchange:
        given = words()
        return ", ".join(given), f"Answer: {given[-1]}"

    history = _fill(num_tokens, count, draw)
    known = {given for given, _ in history}
    questions: dict[str, Question] = {}
    while len(questions) < _ASKED:
        given = words()
        if ", ".join(given) not in known:
            questions[", ".join(given)] = Question(", ".join(given), "Answer:", (given[-1],), 3)
    return Sample("", tuple(questions.values()), history)


def long_chat(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """A chat of many short exchanges, ten of them about a number; eight of these questions are asked again."""
    numbers = {place: number(rng, 4) for place in rng.sample(PLACES, 10)}
    facts = [(f"What is the number of {key}?", f"The number of {key} is {value}.") for key, value in numbers.items()]
    room = num_tokens - sum(count(part) for fact in facts for part in fact) - _EXCHANGE_TOKENS * len(facts)
    history = list(_fill(room, count, lambda: (rng.choice(sentences()), rng.choice(_REPLIES))))
    for fact in facts:
        history.insert(rng.randrange(len(history) + 1), fact)
    questions = (
        Question(f"What is the number of {key}?", f"The number of {key} is", (numbers[key],), 6)
        for key in rng.sample(list(numbers), _ASKED)
    )
    return Sample("", tuple(questions), tuple(history))


def _fill(num_tokens: int, count: CountTokens, draw: Callable[[], Exchange]) -> tuple[Exchange, ...]:
    """So many drawn exchanges that the chat is at most this long, and just about."""
    parts: list[Exchange] = []
    room = num_tokens
    while True:
        part = draw()
        room -= sum(map(count, part)) + _EXCHANGE_TOKENS
        if room < 0:
            return tuple(parts)
        parts.append(part)
