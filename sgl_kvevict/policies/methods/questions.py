"""``questions``: what questions about the prefix attended to, those seen so far or given with it.

Source: this project; the score is that of ``reconstruction``, with questions for readers.
"""

from __future__ import annotations

from sgl_kvevict.policies.budget_options import OneBudgetOptions
from sgl_kvevict.policies.method import Method
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import ReaderAttentionScorer
from sgl_kvevict.policies.selectors import TopKSelector
from sgl_kvevict.policies.signals import Readers


def _build(options: OneBudgetOptions) -> Policy:
    scorer, readers = ReaderAttentionScorer(), Readers.QUESTIONS
    return Policy("questions", scorer, options.allocator(), TopKSelector(), readers=readers)


METHOD = Method(
    name="questions",
    summary="entries that questions about the prefix attended to: those seen so far, or given with it",
    source="this project",
    use_when="shared prefixes whose typical questions are known",
    options_type=OneBudgetOptions,
    build=_build,
)
