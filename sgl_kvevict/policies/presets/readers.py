"""Methods that look at a prefix through the eyes of its readers: context reconstruction and sample questions."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.policies.observation import Readers
from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.presets.budget import BudgetOptions, budget_rule
from sgl_kvevict.policies.presets.entry import PolicyEntry
from sgl_kvevict.policies.scorers import PeakAttentionScorer
from sgl_kvevict.policies.selectors import TopKSelector


@dataclass(frozen=True)
class ReconstructionOptions(BudgetOptions):
    """Options of ``reconstruction``."""

    budget_rule: str = budget_rule("all-layers")
    use_echo: bool = option(True, "score by what the passes' queries see from right behind a token, too")


@dataclass(frozen=True)
class QuestionsOptions(BudgetOptions):
    """Options of ``questions``."""

    budget_rule: str = budget_rule("all-layers")


def _reconstruction(options: ReconstructionOptions) -> Policy:
    scorer = PeakAttentionScorer(options.use_echo)
    return Policy("reconstruction", scorer, options.allocator(), TopKSelector(), readers=Readers.REPETITION)


def _questions(options: QuestionsOptions) -> Policy:
    scorer = PeakAttentionScorer()
    return Policy("questions", scorer, options.allocator(), TopKSelector(), readers=Readers.QUESTIONS)


RECONSTRUCTION = PolicyEntry(
    "reconstruction",
    "entries that the model needs to repeat the prefix, found out in extra passes; one budget for all layers",
    ReconstructionOptions,
    _reconstruction,
)
QUESTIONS = PolicyEntry(
    "questions",
    "entries that questions about the prefix attended to: those seen so far, or given with it",
    QuestionsOptions,
    _questions,
)
