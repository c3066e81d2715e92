"""The tasks by name."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence

from kvevict_quality.corpus import CountTokens
from kvevict_quality.sample import Sample
from kvevict_quality.tasks import chat, lookup, needles, reading, shots, texts

Make = Callable[[random.Random, int, CountTokens], Sample]

NEEDLE_TASKS: Mapping[str, Make] = {
    "needle-single": needles.single,
    "needle-multi-key": needles.multi_key,
    "needle-multi-value": needles.multi_value,
    "needle-multi-query": needles.multi_query,
}
_DRAWN: Mapping[str, Make] = {
    **NEEDLE_TASKS,
    "key-value": lookup.key_value,
    "code": lookup.code,
    "multi-turn": chat.recall,
    "table": lookup.table,
    "few-shot": shots.few_shot,
    "pattern": shots.pattern,
    "long-chat": shots.long_chat,
}
READING = "reading"
TASKS = (*_DRAWN, READING)
#: Their texts and questions come from elsewhere (``archives``).
TEXT_TASKS: Mapping[str, Make] = {"squad": texts.squad, "factbook": texts.factbook}
GROUPS: Mapping[str, tuple[str, ...]] = {"needles": tuple(NEEDLE_TASKS), "texts": tuple(TEXT_TASKS), "all": TASKS}
#: Distributions over real text, without questions.
FIDELITY_TASKS = ("fidelity", "speeches")
#: Room that is left in a context for the chat template.
TEMPLATE_TOKENS = 48


def make_sample(task: str, tokens: int, seed: int, index: int, count: CountTokens) -> Sample:
    """The ``index``-th context of a task; the same for the same arguments.

    Args:
        task: a name of ``TASKS`` or ``TEXT_TASKS``.
        tokens: length that the context has at most, chat template included.
        seed: of the whole run.
        index: 0, 1, ...
        count: tokens of a text.
    """
    rng = random.Random(zlib.crc32(f"{task}/{tokens}/{seed}/{index}".encode()))
    if task == READING:
        return reading.reading(rng, tokens - TEMPLATE_TOKENS, count, seed, index)
    return {**_DRAWN, **TEXT_TASKS}[task](rng, tokens - TEMPLATE_TOKENS, count)


def select_tasks(names: Sequence[str]) -> tuple[str, ...]:
    """Task names, groups resolved.

    ValueError: an unknown name.
    """
    allowed = (*TASKS, *TEXT_TASKS, *FIDELITY_TASKS)
    selected = dict.fromkeys(name for given in names for name in GROUPS.get(given, (given,)))
    for name in selected:
        if name not in allowed:
            raise ValueError(f"task: got {name!r}; allowed: {', '.join((*GROUPS, *allowed))}")
    return tuple(selected)
