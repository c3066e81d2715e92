"""``pyramidkv``: SnapKV's scores, with more entries in shallow layers and fewer in deep ones.

Source: PyramidKV (arXiv 2406.02069), Sec. 4.2; the layers' shares are :class:`PyramidLayers`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.policies.budget_options import budget_rule
from sgl_kvevict.policies.method import Method
from sgl_kvevict.policies.methods.snapkv import ADA_KV, SnapKVOptions, as_run_in_ada_kv
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.selectors import TopKSelector


@dataclass(frozen=True)
class PyramidKVOptions(SnapKVOptions):
    """Options of ``pyramidkv``."""

    budget_rule: str = budget_rule("pyramid")


def _build(options: PyramidKVOptions) -> Policy:
    return Policy("pyramidkv", options.scorer(), options.allocator(), TopKSelector())


METHOD = Method(
    name="pyramidkv",
    summary="SnapKV's scores, with more entries in shallow layers and fewer in deep ones",
    source="PyramidKV (arXiv 2406.02069), Sec. 4.2",
    use_when="the same, small budgets",
    options_type=PyramidKVOptions,
    build=_build,
    paper=as_run_in_ada_kv(f"PyramidKV as run in {ADA_KV}"),
)
