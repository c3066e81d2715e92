"""Methods that look at a prefix through the eyes of its readers: context reconstruction and sample questions."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.policies.observation import Readers
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.presets.budget import BudgetOptions, budget_rule
from sgl_kvevict.policies.presets.entry import PolicyEntry
from sgl_kvevict.policies.scorers import ReaderAttentionScorer
from sgl_kvevict.policies.selectors import TopKSelector


@dataclass(frozen=True)
class ReaderOptions(BudgetOptions):
    """Options of ``reconstruction`` and ``questions``."""

    budget_rule: str = budget_rule("all-layers")


def _policy(name: str, readers: Readers, options: ReaderOptions) -> Policy:
    return Policy(name, ReaderAttentionScorer(), options.allocator(), TopKSelector(), readers=readers)


def _reconstruction(options: ReaderOptions) -> Policy:
    return _policy("reconstruction", Readers.REPETITION, options)


def _questions(options: ReaderOptions) -> Policy:
    return _policy("questions", Readers.QUESTIONS, options)


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
