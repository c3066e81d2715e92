"""Steps in which SGLang resolves its arguments: setups that are refused, windows, sinks, CUDA graphs, latents."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from sgl_kvevict.config import load_config
from sgl_kvevict.errors import KVEvictError
from sgl_kvevict.policies.by_name import build_policy
from sgl_kvevict.sglang_adapter.settings import architecture, is_graph_chosen, resolving
from sgl_kvevict.sglang_adapter.start_facts import before_load
from sgl_kvevict.support import BACKEND_NAME, BACKENDS, BEFORE_LOAD, PLANNED_ON_HOST, attention_backends, require

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

LISTED = frozenset({"GptOssForCausalLM", "Exaone4ForCausalLM"})
"""Architectures that our attention supports and for which SGLang has such a list."""
STAND_IN = "triton"
"""On every list; the settings that SGLang derives from it are right for ours too."""
SOURCE = f"{BACKEND_NAME}: around_model_adjustments"
_COMMANDS = ("launch_server.py", "sglang")
"""``python -m sglang.launch_server`` and ``sglang serve``: programs that listen on ``--port``."""


def after_first_step(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook, first step of a server's start: refuse unsupported setups with all reasons.

    The step turns ``--enable-dp-attention --dp-size N`` into ``--attn-dp-size N``; what the checks read is what it
    decided. Prints the reasons and exits with code 1 in SGLang's own commands; raises :class:`KVEvictError` elsewhere
    (``sgl.Engine``).
    """
    # First SGLang's own step: the checks read what it decides.
    previous(server_args)
    value_of = resolving(server_args)
    if BACKEND_NAME not in map(value_of, BACKENDS):
        return
    is_command = Path(sys.argv[0]).name in _COMMANDS
    try:
        config = load_config()
        # Wrong options of a policy would otherwise be found after the model is loaded.
        build_policy(config.policy, config.policy_options)
        address = (str(value_of("host")), value_of("port")) if is_command else None  # it will listen there
        require(BEFORE_LOAD, before_load(value_of, config, address=address))
    except KVEvictError as error:
        if not is_command:
            raise
        # In SGLang's own commands a traceback of its launcher would bury the reasons.
        raise SystemExit(f"sgl-kvevict: error: {error}") from error


def around_model_adjustments(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook: present our backend as ``STAND_IN`` while SGLang checks its list, and switch off CUDA graphs.

    Only those that are on by default, and that our attention does not support; no later step switches them on.
    """
    value_of = resolving(server_args)
    if value_of("attention_backend") == BACKEND_NAME and architecture(server_args) in LISTED:
        declare_resolution(server_args, SOURCE, attention_backend=STAND_IN)
        previous(server_args)
        # Back at once: later steps, and the runner, have to see the name that was asked for.
        declare_resolution(server_args, SOURCE, attention_backend=BACKEND_NAME)
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
        declare_resolution(server_args, SOURCE, cuda_graph_config=with_phase(config, phase, backend=Backend.DISABLED))


def use_absorbed_queries() -> None:
    """Have SGLang multiply queries with the key projection in every forward, so that attention reads latents.

    A latent is one row per token and layer: a key of all query heads, whose beginning is the value. For backends that
    it does not know, SGLang would prefill prompts without a cached prefix with expanded keys and values.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register(BACKEND_NAME, lambda _attention, _forward_batch: AttnForwardMethod.MLA)
