"""``questions``: ``reconstruction`` with queries of questions: earlier requests, or questions given with the prefix."""

from __future__ import annotations

from sgl_kvevict.policies.options import OneBudgetOptions
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import SignalScorer
from sgl_kvevict.policies.signals import Readers, Signal


class Questions(OneBudgetOptions):
    """``questions``."""

    name = "questions"
    summary = "entries that questions about the prefix attend to: earlier requests, or questions given with it"
    source = "this project"
    use_when = "shared prefixes whose typical questions are known"

    def build(self) -> Policy:
        """Make the policy."""
        return self.policy(SignalScorer(Signal.READER_ATTENTION), readers=Readers.QUESTIONS)
