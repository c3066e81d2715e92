"""Latent attention (MLA): one row per token and layer, a key of all query heads, whose beginning is the value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

from sgl_kvevict.support import BACKEND_NAME

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from torch import nn


def use_absorbed_queries() -> None:
    """Have SGLang multiply queries with the key projection in every forward, so that attention reads latents.

    For backends that it does not know, it would prefill prompts without a cached prefix with expanded keys and values.
    """
    AttentionBackendRegistry.register(BACKEND_NAME, _absorbed)


def _absorbed(attention: nn.Module, forward_batch: ForwardBatch) -> AttnForwardMethod:
    return AttnForwardMethod.MLA
