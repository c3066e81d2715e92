"""``ada-snapkv``: SnapKV's scores, with more entries for heads of diffuse attention (:class:`AdaptiveHeads`)."""

from __future__ import annotations

from sgl_kvevict.policies.methods.snapkv import SnapKV
from sgl_kvevict.policies.options import BudgetRule


class AdaSnapKV(SnapKV):
    """``ada-snapkv``."""

    name = "ada-snapkv"
    summary = "SnapKV's scores, with more entries for heads whose attention is spread out"
    source = "Ada-KV (arXiv 2407.11550), Alg. 1 and 2"
    use_when = "SnapKV's cost, better heads"

    budget_rule: BudgetRule = "adaptive"
