"""Multi-turn recall: a conversation with facts in it is the shared prefix; further turns ask for them."""

from __future__ import annotations

import random

from kvevict_quality.corpus import CountTokens, haystack
from kvevict_quality.sample import Question, Sample
from kvevict_quality.tasks.needles import number
from kvevict_quality.tasks.wordlists import NAMES, THINGS

_ASKED = 8
_TURNS = 4
_REPLY = "I will remember that."
#: Of the reply and of the chat template around both messages.
_EXCHANGE_TOKENS = 20


def recall(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Eight exchanges with a fact each; two conversations go on with four questions each."""
    things = rng.sample(THINGS, _ASKED)
    facts = {f"{rng.choice(NAMES)}'s {thing}": number(rng, 5) for thing in things}
    history: list[tuple[str, str]] = []
    room = num_tokens
    for key, value in facts.items():
        told = f"Please remember this: the code of {key} is {value}."
        share = room // (_ASKED - len(history)) - _EXCHANGE_TOKENS
        text = haystack(rng, [told], share, count)
        room -= count(text) + _EXCHANGE_TOKENS
        history.append((text, _REPLY))
    keys = list(facts)
    rng.shuffle(keys)
    questions = (Question(f"What is the code of {key}?", f"The code of {key} is", (facts[key],), 7) for key in keys)
    return Sample("", tuple(questions), tuple(history), _TURNS)
