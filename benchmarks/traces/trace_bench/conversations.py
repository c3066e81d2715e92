"""Conversations of coding agents, as prompts of numbers that stand for blocks of 64 tokens."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data" / "agent-traces.json.gz"
UNIT = 64
"""Tokens that one token slot stands for: the traces tell blocks of so many tokens apart."""
MAX_CONTEXT = 131_072
"""Context of the stated model (Llama 3.1 8B); longer requests are left out, as its server would refuse them."""


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        prompt: one number per unit; equal numbers stand for units with equal tokens before them and in them.
        answer: units of the answer. If the next prompt goes on from this one, they are its first units after it.
        think_s: seconds between the answer before it and this request.
        agent: 0: the conversation's own; others: a sub-agent's number.
    """

    prompt: list[int]
    answer: list[int]
    think_s: float
    agent: int


@dataclass(frozen=True)
class Conversation:
    """The requests of one agent, one after the other.

    Attributes:
        name: unique in a sample.
        shared: first units of its prompts that other conversations may have: tools and system prompt.
        family: conversations of one family share these units.
    """

    name: str
    shared: int
    family: tuple[int, int]
    turns: list[Turn]


@dataclass
class Numbering:
    """Gives numbers to units: the same number to the same unit with the same units before it."""

    _ids: Iterator[int] = field(default_factory=lambda: count(1))
    _shared: dict[tuple[int, ...], int] = field(default_factory=dict)

    def new(self) -> int:
        """A number that nothing else has."""
        return next(self._ids)

    def shared(self, tools: int, system: int, position: int) -> int:
        """The number of a unit of tools of this length, or of a system prompt after them."""
        key = (tools, position) if position < tools // UNIT else (tools, system, position)
        if key not in self._shared:
            self._shared[key] = self.new()
        return self._shared[key]


class Reader:
    """Numbers the units of one conversation's prompts."""

    def __init__(self, numbering: Numbering, record: dict[str, Any]) -> None:
        self._numbering = numbering
        self._record = record
        self._children: dict[tuple[int, int], int] = {}
        self._agents = count()

    def turns(self) -> Iterator[Turn]:
        """Its requests that fit the context; sub-agents' in place of the call, because the agent waits for them."""
        yield from self._of(self._record["requests"], self._record)

    def _of(self, requests: list[dict[str, Any]], source: dict[str, Any]) -> Iterator[Turn]:
        agent = next(self._agents)
        blocks: list[int] = []
        known: list[tuple[dict[str, Any], list[int]] | Iterator[Turn]] = []
        for request in requests:
            if "requests" in request:
                known.append(self._of(request["requests"], request))
                continue
            blocks = blocks[: request["same"]]
            for first, number in request["new"]:
                blocks = [*blocks, *range(first, first + number)]
            known.append((request, self._number(blocks, source)))
        prompts = [each for each in known if isinstance(each, tuple)]
        after = dict(zip((id(request) for request, _ in prompts), [prompt for _, prompt in prompts[1:]], strict=False))
        for each in known:
            if not isinstance(each, tuple):
                yield from each
                continue
            request, prompt = each
            if prompt and request["in"] + request["out"] <= MAX_CONTEXT:
                answer = self._answer(request, prompt, after.get(id(request), []))
                yield Turn(prompt, answer, request.get("think") or 0.0, agent)

    def _number(self, blocks: list[int], source: dict[str, Any]) -> list[int]:
        tools, system = int(source["tool_tokens"]), int(source["system_tokens"])
        shared, node, prompt = (tools + system) // UNIT, 0, []
        for position, block in enumerate(blocks):
            child = self._children.get((node, block))
            if child is None:
                is_shared = position < shared and not self._children.get((node, -1))
                child = self._numbering.shared(tools, system, position) if is_shared else self._numbering.new()
                self._children[node, block] = child
                if is_shared:  # another block here is another text
                    self._children[node, -1] = child
            node = child
            prompt.append(node)
        return prompt

    def _answer(self, request: dict[str, Any], prompt: list[int], following: list[int]) -> list[int]:
        number = (request["in"] + request["out"]) // UNIT - request["in"] // UNIT
        start = len(prompt)
        if following[:start] == prompt and len(following) >= start + number:
            return following[start : start + number]
        return [self._numbering.new() for _ in range(number)]


class Sample:
    """Conversations in random order by seed; after all of the file come the same again, as other texts."""

    def __init__(self, seed: int) -> None:
        with gzip.open(DATA, "rt", encoding="utf-8") as file:
            records = json.load(file)
        self._more = _conversations(records, Numbering(), random.Random(seed))
        self._known: list[Conversation] = []

    def __iter__(self) -> Iterator[Conversation]:
        """Without end, and the same each time."""
        for number in count():
            if number == len(self._known):
                self._known.append(next(self._more))
            yield self._known[number]


def _conversations(
    records: list[dict[str, Any]], numbering: Numbering, generator: random.Random
) -> Iterator[Conversation]:
    for number in count():
        for record in generator.sample(records, len(records)):
            turns = list(Reader(numbering, record).turns())
            family = int(record["tool_tokens"]), int(record["system_tokens"])
            if turns:
                yield Conversation(f"{record['id']}-{number}", sum(family) // UNIT, family, turns)
