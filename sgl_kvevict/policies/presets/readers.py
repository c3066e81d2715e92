"""Methods that look at a prefix through its readers' eyes: reconstruction, what is learned from it, and questions."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.policies.observation import Readers
from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.presets.budget import BudgetOptions, budget_rule
from sgl_kvevict.policies.presets.entry import PolicyEntry
from sgl_kvevict.policies.scorers import DistilledScorer, ReaderAttentionScorer
from sgl_kvevict.policies.selectors import TopKSelector


@dataclass(frozen=True)
class ReaderOptions(BudgetOptions):
    """Options of ``reconstruction`` and ``questions``."""

    budget_rule: str = budget_rule("all-layers")


@dataclass(frozen=True)
class DistilledOptions(ReaderOptions):
    """Options of ``distilled``."""

    use_window: bool = option(True, "look at the attention of the prompt's last queries too, not at the cache alone")


def _policy(name: str, readers: Readers, options: ReaderOptions) -> Policy:
    return Policy(name, ReaderAttentionScorer(), options.allocator(), TopKSelector(), readers=readers)


def _reconstruction(options: ReaderOptions) -> Policy:
    return _policy("reconstruction", Readers.REPETITION, options)


def _questions(options: ReaderOptions) -> Policy:
    return _policy("questions", Readers.QUESTIONS, options)


def _distilled(options: DistilledOptions) -> Policy:
    scorer = DistilledScorer(options.use_window)
    return Policy("distilled", scorer, options.allocator(), TopKSelector(), readers=Readers.REPETITION)


DISTILLED = PolicyEntry(
    "distilled",
    "what reconstruction would keep, as learned from its passes; while nothing is learned, what they keep",
    DistilledOptions,
    _distilled,
)
RECONSTRUCTION = PolicyEntry(
    "reconstruction",
    "entries that the model needs to repeat the prefix, found out in extra passes; one budget for all layers",
    ReaderOptions,
    _reconstruction,
)
QUESTIONS = PolicyEntry(
    "questions",
    "entries that questions about the prefix attended to: those seen so far, or given with it",
    ReaderOptions,
    _questions,
)
