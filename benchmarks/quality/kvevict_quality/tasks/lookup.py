"""Look-ups in structured text: keys and values, and constants in code."""

from __future__ import annotations

import random

from kvevict_quality.corpus import CountTokens
from kvevict_quality.sample import Question, Sample
from kvevict_quality.tasks.needles import number
from kvevict_quality.tasks.wordlists import CITIES, NOUNS, VERBS

_ASKED = 8


def key_value(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Nothing but keys and values; eight of them are asked for."""
    records = {f"{rng.choice(CITIES)}-{number(rng, 3)}": number(rng, 5) for _ in range(num_tokens)}
    lines, room = [], num_tokens - 20
    for key, value in records.items():
        line = f'"{key}": "{value}"'
        room -= count(f"{line},\n")
        if room < 0:
            break
        lines.append(line)
    keys = rng.sample(list(records)[: len(lines)], _ASKED)
    body = ",\n".join(lines)
    questions = (Question(f'What is the value of the key "{key}"?', f'"{key}": "', (records[key],), 7) for key in keys)
    return Sample(f"JSON data:\n{{\n{body}\n}}", tuple(questions))


def code(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """A module of small functions; what eight of them return is asked for."""
    names = [f"{verb}_{noun}" for verb in VERBS for noun in NOUNS]
    rng.shuffle(names)
    functions: dict[str, str] = {}
    parts, room = [], num_tokens - 20
    for name in names:
        argument, value = rng.choice(NOUNS), number(rng, 5)
        body = rng.choice(
            (f"    {argument}.update()\n", f"    assert {argument} is not None\n", f"    log({argument})\n")
        )
        text = f"def {name}({argument}):\n{body}    return {value}\n"
        room -= count(f"{text}\n")
        if room < 0:
            break
        parts.append(text)
        functions[name] = value
    asked = rng.sample(list(functions), _ASKED)
    questions = (
        Question(
            f"What number does the function {name} return?",
            f"The function {name} returns the number",
            (functions[name],),
            7,
        )
        for name in asked
    )
    module = "\n".join(parts)
    return Sample(f"This is a Python module:\n\n```python\n{module}```", tuple(questions))
