"""``ada-pyramidkv``: PyramidKV's layer budgets, shared out to the heads of a layer as in Ada-KV.

Source: Ada-KV (arXiv 2407.11550), Alg. 2; shares are :class:`PyramidLayers`, then :class:`AdaptiveHeads`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.policies.budget_options import budget_rule
from sgl_kvevict.policies.method import Method
from sgl_kvevict.policies.methods.ada_snapkv import SAFEGUARD
from sgl_kvevict.policies.methods.snapkv import ADA_KV, SnapKVOptions, as_run_in_ada_kv
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.selectors import TopKSelector


@dataclass(frozen=True)
class AdaPyramidKVOptions(SnapKVOptions):
    """Options of ``ada-pyramidkv``."""

    budget_rule: str = budget_rule("adaptive-pyramid")


def _build(options: AdaPyramidKVOptions) -> Policy:
    return Policy("ada-pyramidkv", options.scorer(), options.allocator(), TopKSelector())


METHOD = Method(
    name="ada-pyramidkv",
    summary="PyramidKV's layer budgets, shared out to the heads of a layer as in Ada-KV",
    source="Ada-KV (arXiv 2407.11550), Alg. 2",
    use_when="as ada-snapkv, small budgets",
    options_type=AdaPyramidKVOptions,
    build=_build,
    paper=as_run_in_ada_kv(ADA_KV, *SAFEGUARD),
)
