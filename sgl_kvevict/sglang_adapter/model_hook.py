"""What SGLang decides by the model and the name of the attention backend: windows, sinks, CUDA graphs, latents."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from sgl_kvevict.config import load_config
from sgl_kvevict.sglang_adapter.settings import architecture, decide, is_graph_chosen, resolving
from sgl_kvevict.support import BACKEND_NAME, PLANNED_ON_HOST, attention_backends

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

LISTED = frozenset({"GptOssForCausalLM", "Exaone4ForCausalLM"})
"""Architectures that our attention supports and for which SGLang has such a list."""
STAND_IN = "triton"
"""On every list; the settings that SGLang derives from it are right for ours too."""
SOURCE = f"{BACKEND_NAME}: around_model_adjustments"


def around_model_adjustments(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook: present our backend as ``STAND_IN`` while SGLang checks its list, and switch off CUDA graphs.

    Only those that are on by default, and that our attention does not support; no later step switches them on.
    """
    value_of = resolving(server_args)
    if value_of("attention_backend") == BACKEND_NAME and architecture(server_args) in LISTED:
        decide(server_args, SOURCE, attention_backend=STAND_IN)
        previous(server_args)
        # Back at once: later steps, and the runner, have to see the name that was asked for.
        decide(server_args, SOURCE, attention_backend=BACKEND_NAME)
    else:
        previous(server_args)
    if BACKEND_NAME not in attention_backends(value_of):
        return
    reasons = {Phase.PREFILL: "a captured prefill cannot follow requests to other spans"}
    attention = load_config().attention
    if attention in PLANNED_ON_HOST:
        reasons[Phase.DECODE] = f"attention {attention!r} plans on the host"
    for phase, reason in reasons.items():
        config = value_of("cuda_graph_config")
        # A user's explicit choice is not overruled; the backend refuses it, with the reason, when it is built.
        if is_graph_chosen(server_args, phase) or config[phase].backend == Backend.DISABLED:
            continue
        logger.warning("CUDA graphs of %s steps are switched off: %s.", phase, reason)
        decide(server_args, SOURCE, cuda_graph_config=with_phase(config, phase, backend=Backend.DISABLED))


def use_absorbed_queries() -> None:
    """Have SGLang multiply queries with the key projection in every forward, so that attention reads latents.

    A latent is one row per token and layer: a key of all query heads, whose beginning is the value. For backends that
    it does not know, SGLang would prefill prompts without a cached prefix with expanded keys and values.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register(BACKEND_NAME, lambda _attention, _forward_batch: AttnForwardMethod.MLA)
