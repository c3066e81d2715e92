"""``ada-snapkv``: SnapKV's scores, with more entries for heads of diffuse attention (:class:`AdaptiveHeads`)."""

from __future__ import annotations

from sgl_kvevict.policies.methods.snapkv import ADA_KV, SnapKV, as_run_in_ada_kv
from sgl_kvevict.policies.options import BudgetRule, PaperValue

SAFEGUARD = (
    PaperValue("safeguard", "paper", "Alg. 2, line 8"),
    PaperValue("alpha", 0.2, "experiments, settings"),
)
"""The paper's mix of adaptive and equal shares."""


class AdaSnapKV(SnapKV):
    """``ada-snapkv``."""

    name = "ada-snapkv"
    summary = "SnapKV's scores, with more entries for heads whose attention is spread out"
    source = "Ada-KV (arXiv 2407.11550), Alg. 1 and 2"
    use_when = "SnapKV's cost, better heads"
    paper = as_run_in_ada_kv(ADA_KV, *SAFEGUARD)

    budget_rule: BudgetRule = "adaptive"
