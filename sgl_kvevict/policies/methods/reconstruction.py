"""``reconstruction``: what the model needs to repeat the prefix, found out in extra passes.

Source: KVzip (arXiv 2505.23416), Sec. 3, Eq. 3; how it differs, :class:`ReaderAttentionScorer` says.
"""

from __future__ import annotations

from sgl_kvevict.policies.budget_options import OneBudgetOptions
from sgl_kvevict.policies.method import Method
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import ReaderAttentionScorer
from sgl_kvevict.policies.selectors import TopKSelector
from sgl_kvevict.policies.signals import Readers


def _build(options: OneBudgetOptions) -> Policy:
    scorer, readers = ReaderAttentionScorer(), Readers.REPETITION
    return Policy("reconstruction", scorer, options.allocator(), TopKSelector(), readers=readers)


METHOD = Method(
    name="reconstruction",
    summary="entries that the model needs to repeat the prefix, found out in extra passes; one budget for all layers",
    source="KVzip (arXiv 2505.23416)",
    use_when="shared prefixes whose questions are unknown",
    options_type=OneBudgetOptions,
    build=_build,
)
