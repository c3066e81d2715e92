"""``ada-snapkv``: SnapKV's scores, with more entries for heads whose attention is spread out.

Source: Ada-KV (arXiv 2407.11550), Alg. 1 and 2; the heads' shares are :class:`AdaptiveHeads`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.policies.budget_options import budget_rule
from sgl_kvevict.policies.method import Method, PaperValue
from sgl_kvevict.policies.methods.snapkv import ADA_KV, SnapKVOptions, as_run_in_ada_kv
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.selectors import TopKSelector

SAFEGUARD = (
    PaperValue("safeguard", "paper", "Alg. 2, line 8"),
    PaperValue("alpha", 0.2, "experiments, settings"),
)
"""How the paper mixes adaptive shares with equal ones."""


@dataclass(frozen=True)
class AdaSnapKVOptions(SnapKVOptions):
    """Options of ``ada-snapkv``."""

    budget_rule: str = budget_rule("adaptive")


def _build(options: AdaSnapKVOptions) -> Policy:
    return Policy("ada-snapkv", options.scorer(), options.allocator(), TopKSelector())


METHOD = Method(
    name="ada-snapkv",
    summary="SnapKV's scores, with more entries for heads whose attention is spread out",
    source="Ada-KV (arXiv 2407.11550), Alg. 1 and 2",
    use_when="SnapKV's cost, better heads",
    options_type=AdaSnapKVOptions,
    build=_build,
    paper=as_run_in_ada_kv(ADA_KV, *SAFEGUARD),
)
