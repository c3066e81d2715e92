"""CUDA graphs: refuses or switches off what is unsupported, and attaches requests to replays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from sgl_kvevict.config import load_config
from sgl_kvevict.sglang_adapter.settings import decide, is_graph_chosen, resolving
from sgl_kvevict.support import BACKEND_NAME, PLANNED_ON_HOST, attention_backends

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
