"""Policies choose the entries of a prefix to keep: signals, scorer, budget, selector, and optional merger."""

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.policies.by_name import build_policy, configured_policy, list_policies
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.options import NamedPolicy
from sgl_kvevict.policies.parts import (
    BudgetAllocator,
    Decision,
    Merger,
    RangeScores,
    Scorer,
    Selector,
    TokenScores,
    Trait,
)
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.signals import QueryMoments, QueryWindow, Signal

__all__ = [
    "BudgetAllocator",
    "Decision",
    "LayerView",
    "Merger",
    "NamedPolicy",
    "Policy",
    "QueryMoments",
    "QueryWindow",
    "RangeScores",
    "Rotary",
    "Scorer",
    "Selector",
    "Signal",
    "TokenScores",
    "Trait",
    "build_policy",
    "configured_policy",
    "list_policies",
]
