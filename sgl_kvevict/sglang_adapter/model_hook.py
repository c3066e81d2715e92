"""Models that SGLang serves by the name of the attention backend: windows and sinks; latents (MLA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sgl_kvevict.sglang_adapter.settings import architecture, decide, resolving
from sgl_kvevict.support import BACKEND_NAME

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

LISTED = frozenset({"GptOssForCausalLM", "Exaone4ForCausalLM"})
"""Architectures that our attention supports and for which SGLang has such a list."""
STAND_IN = "triton"
"""On every list; the settings that SGLang derives from it are right for ours too."""


def around_model_adjustments(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook: present our backend as ``STAND_IN`` while SGLang checks its list."""
    is_ours = resolving(server_args)("attention_backend") == BACKEND_NAME
    if not is_ours or architecture(server_args) not in LISTED:
        previous(server_args)
        return
    source = f"{BACKEND_NAME}: around_model_adjustments"
    decide(server_args, source, attention_backend=STAND_IN)
    previous(server_args)
    decide(server_args, source, attention_backend=BACKEND_NAME)


def use_absorbed_queries() -> None:
    """Have SGLang multiply queries with the key projection in every forward, so that attention reads latents.

    A latent is one row per token and layer: a key of all query heads, whose beginning is the value. For backends that
    it does not know, SGLang would prefill prompts without a cached prefix with expanded keys and values.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register(BACKEND_NAME, lambda _attention, _forward_batch: AttnForwardMethod.MLA)
