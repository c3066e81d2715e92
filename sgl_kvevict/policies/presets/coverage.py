"""K-VEC: heads and layers that keep different tokens."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.presets.budget import BudgetOptions
from sgl_kvevict.policies.presets.entry import PolicyEntry
from sgl_kvevict.policies.scorers import CrossHeadScorer
from sgl_kvevict.policies.selectors import CoverageSelector


@dataclass(frozen=True)
class KVecOptions(BudgetOptions):
    """Options of ``k-vec``."""

    base_window: int = option(16, "queries at the end of the prompt that score most heads (O)", minimum=1)
    extended_window: int = option(32, "queries that score the least focused heads (O')", minimum=1)
    rescored_share: float = option(
        0.375, "share of a layer's KV heads, the least focused ones (delta: 3 of 8); 0 = none", minimum=0, maximum=1
    )
    bonus: float = option(1.0, "weight of the cross-layer bonus (lambda); 0 = none", minimum=0)
    protected_share: float = option(
        0.25, "share of a head's budget sure for its own best tokens (beta)", minimum=0, maximum=1
    )
    kernel_size: int = option(1, "width of a max pool along the tokens; 1 = no pool", minimum=1, odd=True)
    keep_window: bool = option(True, "base-window tokens inside the range are kept without competing")


def _k_vec(options: KVecOptions) -> Policy:
    if options.extended_window < options.base_window:
        raise ConfigError(
            f"policy_options.extended_window: got {options.extended_window} for policy 'k-vec'; allowed: an "
            f"integer >= base_window = {options.base_window}"
        )
    scorer = CrossHeadScorer(
        options.extended_window,
        options.base_window,
        options.rescored_share,
        options.kernel_size,
        options.keep_window,
    )
    return Policy("k-vec", scorer, options.allocator(), CoverageSelector(options.bonus, options.protected_share))


K_VEC = PolicyEntry(
    "k-vec",
    "SnapKV's scores, steered so that heads and layers together cover more of the prompt",
    KVecOptions,
    _k_vec,
)
