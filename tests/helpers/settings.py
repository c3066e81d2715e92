"""Settings of a server as SGLang resolves them when nothing is given, for tests of what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.sglang_adapter.settings import ServerSettings
from sgl_kvevict.support import AFTER_LOAD, AfterLoad, Kernels, reasons

DEFAULT = ServerSettings(
    ranks_per_host=1,
    attn_dp_size=1,
    chunked_prefill_size=4096,
    speculative_algorithm=None,
    speculative_num_draft_tokens=None,
    state_strategy="no_buffer",
    strips_thinking=False,
    load_format="auto",
    model_path="model",
    tokenizer_path="model",
)


def settings(**changes: Any) -> ServerSettings:
    return replace(DEFAULT, **changes)


def loaded(
    config: KVEvictConfig | None = None, policy: Policy | None = None, own: ServerSettings = DEFAULT, **facts: Any
) -> AfterLoad:
    """Facts of a model of which nothing is refused, but for what is given."""
    kernels = Kernels("auto", "triton", "cuda", dtype="bfloat16", head_dim=64)
    return AfterLoad(
        **(vars(kernels) | {"config": config or KVEvictConfig(), "policy": policy, "settings": own} | facts)
    )


def refused(
    config: KVEvictConfig | None = None, policy: Policy | None = None, own: ServerSettings = DEFAULT, **facts: Any
) -> list[str]:
    """What is refused of :func:`loaded`."""
    return reasons(AFTER_LOAD, loaded(config, policy, own, **facts))
