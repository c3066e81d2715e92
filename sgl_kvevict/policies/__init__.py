"""Policies choose the entries of a prefix to keep: signals, scorer, budget, selector, and optional merger."""

from sgl_kvevict.policies.by_name import build_policy, list_policies
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.options import NamedPolicy
from sgl_kvevict.policies.parts import BudgetAllocator, Merger, RangeScores, Scorer, Selector, TokenScores, Trait
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.signals import QueryWindow, Signal

__all__ = [
    "BudgetAllocator",
    "LayerView",
    "Merger",
    "NamedPolicy",
    "Policy",
    "QueryWindow",
    "RangeScores",
    "Scorer",
    "Selector",
    "Signal",
    "TokenScores",
    "Trait",
    "build_policy",
    "list_policies",
]
