"""``reconstruction``: entries that the model needs to repeat the prefix, measured in scoring passes (as KVzip)."""

from __future__ import annotations

from sgl_kvevict.policies.options import OneBudgetOptions
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import SignalScorer
from sgl_kvevict.policies.signals import Signal


class Reconstruction(OneBudgetOptions):
    """``reconstruction``."""

    name = "reconstruction"
    summary = "entries that the model needs to repeat the prefix, measured in extra passes; one budget for all layers"
    source = "KVzip (arXiv 2505.23416)"
    use_when = "shared prefixes whose questions are unknown"

    def build(self) -> Policy:
        """Make the policy."""
        return self.policy(SignalScorer(Signal.READER_ATTENTION))
