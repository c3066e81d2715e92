"""Settings of a server as SGLang resolves them when nothing is given, for tests of what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.support import AFTER_LOAD, AfterLoad, Kernels, reasons

DEFAULT: Mapping[str, Any] = {
    "attn_dp_size": 1,
    "chunked_prefill_size": 4096,
    "speculative_algorithm": None,
    "speculative_num_draft_tokens": None,
    "mamba_radix_cache_strategy": "no_buffer",
    "strip_thinking_cache": False,
}


def settings(**changes: Any) -> Mapping[str, Any]:
    return {**DEFAULT, **changes}


def loaded(
    config: KVEvictConfig | None = None, policy: Policy | None = None, own: Mapping[str, Any] = DEFAULT, **facts: Any
) -> AfterLoad:
    """Facts of a model of which nothing is refused, but for what is given."""
    kernels = Kernels("auto", "triton", "cuda", dtype="bfloat16", head_dim=64)
    given = {"config": config or KVEvictConfig(), "policy": policy, "value_of": own.__getitem__}
    return AfterLoad(**(vars(kernels) | given | facts))


def refused(
    config: KVEvictConfig | None = None, policy: Policy | None = None, own: Mapping[str, Any] = DEFAULT, **facts: Any
) -> list[str]:
    """What is refused of :func:`loaded`."""
    return reasons(AFTER_LOAD, loaded(config, policy, own, **facts))
