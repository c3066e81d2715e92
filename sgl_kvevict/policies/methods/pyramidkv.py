"""``pyramidkv``: SnapKV's scores, with more entries in shallow layers (:class:`PyramidLayers`)."""

from __future__ import annotations

from sgl_kvevict.policies.methods.snapkv import SnapKV
from sgl_kvevict.policies.options import BudgetRule


class PyramidKV(SnapKV):
    """``pyramidkv``."""

    name = "pyramidkv"
    summary = "SnapKV's scores, with more entries in shallow layers and fewer in deep ones"
    source = "PyramidKV (arXiv 2406.02069), Sec. 4.2"
    use_when = "the same, small budgets"

    budget_rule: BudgetRule = "pyramid"
