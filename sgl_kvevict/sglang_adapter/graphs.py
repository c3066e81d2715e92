"""CUDA graphs: refuses or switches off what is unsupported, and attaches requests to replays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend, with_phase

from sgl_kvevict.attention.backend import PLANNED_ON_HOST, resolve_attention
from sgl_kvevict.config import load_config
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.sglang_adapter.compat import BACKEND_NAME
from sgl_kvevict.sglang_adapter.settings import decide, is_graph_chosen, resolving
from sgl_kvevict.sglang_adapter.start_checks import attention_backends

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


def after_attention_backend(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook: switch off default CUDA graphs that our attention does not support.

    A user's explicit choice is left, and refused when the backend is built.
    """
    previous(server_args)
    value_of = resolving(server_args)
    if BACKEND_NAME not in attention_backends(value_of):
        return
    reasons = {Phase.PREFILL: "a captured prefill cannot follow requests to other spans"}
    attention = load_config().attention
    if attention in PLANNED_ON_HOST:
        reasons[Phase.DECODE] = f"attention {attention!r} plans on the host"
    for phase, reason in reasons.items():
        config = value_of("cuda_graph_config")
        if is_graph_chosen(server_args, phase) or config[phase].backend == Backend.DISABLED:
            continue
        logger.warning("CUDA graphs of %s steps are switched off: %s.", phase, reason)
        off = with_phase(config, phase, backend=Backend.DISABLED)
        decide(server_args, f"{BACKEND_NAME}: after_attention_backend", cuda_graph_config=off)


def around_replay_view(build: Callable[..., SimpleNamespace], *args: Any, **kwargs: Any) -> SimpleNamespace:
    """Hook of ``build_replay_fb_view``: add the requests to the view of a batch about to be replayed."""
    view = build(*args, **kwargs)
    view.rids = kwargs["forward_batch"].rids
    return view


def graph_reasons(attention: str) -> list[str]:
    """Return a sentence for every unsupported setting of CUDA graphs; ``attention``: the resolved implementation."""
    reasons = []
    if not check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED):
        reasons.append(
            "CUDA graphs of prefills are on, and a captured prefill cannot follow requests to other spans: start with "
            "--cuda-graph-backend-prefill disabled"
        )
    if check_cuda_graph_backend(Phase.DECODE, Backend.BREAKABLE):
        reasons.append(
            "--cuda-graph-backend-decode is 'breakable': its attention runs without request ids "
            "(allowed: 'full', 'disabled')"
        )
    if check_cuda_graph_backend(Phase.DECODE, Backend.FULL) and attention in PLANNED_ON_HOST:
        reasons.append(
            f"attention is {attention!r}, whose plans are made on the host and cannot be captured: start with "
            "--cuda-graph-backend-decode disabled, or with another attention"
        )
    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        reasons.append("SGLANG_ENABLE_METADATA_GLUE_GRAPH is set, which would record one batch's spans for all batches")
    return reasons


def device_reasons(attention: str, device: str) -> list[str]:
    """Return a sentence for everything that an attention does not support on a device ("cpu" or "cuda")."""
    reasons: list[str] = []
    chosen = attention
    try:
        chosen = resolve_attention(attention, device)
    except UnsupportedSetupError as error:
        reasons += error.reasons
    return reasons + (graph_reasons(chosen) if device == "cuda" else [])
