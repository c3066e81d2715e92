"""Coding agents of recorded lengths, 1/32 as long, as prompts of prose with needles in the outputs of their tools.

Lengths, and which tokens two prompts share, are those of the conversations of ``benchmarks/traces``, which have no
text. A unit of the traces, 64 tokens, is two tokens here.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvevict_quality.corpus import haystack
from kvevict_quality.sample import Prompts, Sample
from kvevict_quality.tasks import TEMPLATE_TOKENS, make_sample

from serving_bench.needles import SEED, TASKS, Asked, Context
from serving_bench.results import ROOT

sys.path.append(str(ROOT / "benchmarks" / "traces"))

from trace_bench import conversations as traces

UNIT_TOKENS = traces.UNIT // 32
MIN_OWN_TOKENS = 256
"""What an agent's first prompt has beyond tools and system prompt, at least: six needles and prose between them."""


@dataclass(frozen=True)
class Agent:
    """One agent.

    Attributes:
        turns: its prompts, one after the other, with the questions that can be answered from each.
        units: of the last prompt; equal numbers are the same tokens behind the same tokens.
    """

    turns: list[Context]
    units: list[int]


class Writer:
    """Writes the text of recorded conversations; the same text for units with the same number.

    Args:
        prompts: of the model that is to read it.
    """

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._tokens: dict[int, list[int]] = {}
        self._head = prompts.context_ids(Sample("", ()))

    def agent(self, conversation: traces.Conversation, num_turns: int, index: int) -> Agent | None:
        """So many requests of a conversation, from a random one on; None if it is too short. Sub-agents are left out.

        Args:
            conversation: the recorded one.
            num_turns: requests of the agent.
            index: decides which needle task its tools' outputs come from.
        """
        rng = random.Random(zlib.crc32(conversation.name.encode()))
        turns = [turn.prompt for turn in conversation.turns if not turn.agent]
        if len(turns) < num_turns:
            return None
        first = rng.randrange(len(turns) - num_turns + 1)
        turns = turns[first : first + num_turns]
        shared, own = turns[0][: conversation.shared], turns[0][conversation.shared :]
        if len(own) * UNIT_TOKENS < MIN_OWN_TOKENS:
            return None
        # Tools and system prompts have the same text wherever they have the same numbers.
        self._write(shared, "", random.Random(next((unit for unit in shared if unit not in self._tokens), 0)))
        task, room = TASKS[index % len(TASKS)], len(own) * UNIT_TOKENS
        sample = make_sample(task, room + TEMPLATE_TOKENS, SEED, index, self._prompts.count)
        self._write(own, sample.context, rng)
        for prompt in turns[1:]:
            self._write(prompt, "", rng)
        return Agent([self._context(prompt, sample) for prompt in turns], turns[-1])

    def _write(self, units: Sequence[int], text: str, rng: random.Random) -> None:
        """Give tokens to the units that have none: ``text``, then prose."""
        new = [unit for unit in units if unit not in self._tokens]
        room = len(new) * UNIT_TOKENS
        ids = self._prompts.encode(text)
        while len(ids) < room:
            ids += self._prompts.encode(" " + haystack(rng, (), room + 256, self._prompts.count))
        for place, unit in enumerate(new):
            self._tokens[unit] = ids[place * UNIT_TOKENS : (place + 1) * UNIT_TOKENS]

    def _context(self, units: Sequence[int], sample: Sample) -> Context:
        ids = [token for unit in units for token in self._tokens[unit]]
        ids[: len(self._head)] = self._head  # the chat template's, before all tools
        text = self._prompts.decode(ids)  # what an agent has left out of its history is not asked for
        known = tuple(
            each for each in sample.questions if all(f"{each.lead} {answer}" in text for answer in each.answers)
        )
        return Context(ids, Sample(sample.context, known))


def working_set(agents: Sequence[Agent]) -> int:
    """Tokens of the last prompts of all agents, what they share counted once."""
    return len({unit for agent in agents for unit in agent.units}) * UNIT_TOKENS


def make_agents(prompts: Prompts, seed: int, tokens: int, num_turns: int) -> list[Agent]:
    """Agents with ``num_turns`` turns each, in random order by seed, as many as have a working set of ``tokens``."""
    writer, found = Writer(prompts), list[Agent]()
    for index, conversation in enumerate(traces.Sample(seed)):
        agent = writer.agent(conversation, num_turns, index)
        if agent is not None and agent.turns[0].sample.questions:
            found.append(agent)
        if working_set(found) >= tokens:
            break
    return found


def turn_of(agents: Sequence[Agent], turn: int, *, all_questions: bool = False) -> list[Asked]:
    """What all agents ask in one turn, in random order: one question each, or all, one after the other."""
    order = random.Random(f"{SEED}/{turn}").sample(range(len(agents)), len(agents))
    asked: list[Asked] = []
    for index in order:
        context = agents[index].turns[turn]
        questions = context.sample.questions
        chosen = questions if all_questions else questions[turn % max(len(questions), 1) :][:1]
        asked += [(context, question) for question in chosen]
    return asked
