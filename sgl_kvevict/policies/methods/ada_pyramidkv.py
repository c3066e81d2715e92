"""``ada-pyramidkv``: PyramidKV's layer budgets (:class:`PyramidLayers`), split over heads by :class:`AdaptiveHeads`."""

from __future__ import annotations

from sgl_kvevict.policies.methods.snapkv import SnapKV
from sgl_kvevict.policies.options import BudgetRule


class AdaPyramidKV(SnapKV):
    """``ada-pyramidkv``."""

    name = "ada-pyramidkv"
    summary = "PyramidKV's layer budgets, shared out to the heads of a layer as in Ada-KV"
    source = "Ada-KV (arXiv 2407.11550), Alg. 2"
    use_when = "as ada-snapkv, small budgets"

    budget_rule: BudgetRule = "adaptive-pyramid"
