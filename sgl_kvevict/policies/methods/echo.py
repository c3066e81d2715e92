"""``echo``: the attention of a second reading of the prompt, without the forward pass.

Every query is moved behind all keys, as if the model repeated the text; there it attends to the tokens that continue
it, which a prefill's mask hides. ``kvevict_kernels/echo_attention/`` defines the score. Source: this project, after
KVzip's repetition (arXiv 2505.23416), Sec. 3.
"""

from __future__ import annotations

from sgl_kvevict.policies.options import OneBudgetOptions
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import SignalScorer
from sgl_kvevict.policies.signals import Signal


class Echo(OneBudgetOptions):
    """``echo``."""

    name = "echo"
    summary = "entries that the prompt's own queries attend to when moved behind it; one budget for all layers"
    source = "this project, after KVzip"
    use_when = "questions are unknown and a second reading costs too much"

    def build(self) -> Policy:
        """Make the policy."""
        return self.policy(SignalScorer(Signal.ECHO_ATTENTION))
