"""Which entries of a prefix to keep: policies of scorer, budget allocator, selector, and merger or fitter."""

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.policies.by_name import PolicyInfo, build_policy, list_policies
from sgl_kvevict.policies.configured import configured_policy
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.parts import (
    BudgetAllocator,
    Decision,
    Fitted,
    Fitter,
    Merger,
    PolicyState,
    RangeScores,
    Scorer,
    Selector,
    TokenScores,
    Trait,
)
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.query_moments import QueryMoments
from sgl_kvevict.policies.signals import QueryWindow, Readers, Signal

__all__ = [
    "BudgetAllocator",
    "Decision",
    "Fitted",
    "Fitter",
    "LayerView",
    "Merger",
    "Policy",
    "PolicyInfo",
    "PolicyState",
    "QueryMoments",
    "QueryWindow",
    "RangeScores",
    "Readers",
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
