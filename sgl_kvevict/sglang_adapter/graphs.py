"""CUDA graphs: which settings we cannot follow, and the request ids that SGLang's replay leaves out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

from sgl_kvevict.attention.backend import CAPTURABLE


def around_replay_view(build: Callable[..., SimpleNamespace], *args: Any, **kwargs: Any) -> SimpleNamespace:
    """Hook of ``build_replay_fb_view``: the view of a batch that is about to be replayed names its requests."""
    view = build(*args, **kwargs)
    view.rids = kwargs["forward_batch"].rids
    return view


def graph_reasons(attention: str) -> list[str]:
    """Return one sentence for every setting of CUDA graphs that is not supported.

    Args:
        attention: the resolved implementation.
    """
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
    if check_cuda_graph_backend(Phase.DECODE, Backend.FULL) and attention not in CAPTURABLE:
        reasons.append(
            f"attention is {attention!r}, whose plans are made on the host and cannot be captured: start with "
            f"--cuda-graph-backend-decode disabled, or with attention {' or '.join(map(repr, CAPTURABLE))}"
        )
    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        reasons.append("SGLANG_ENABLE_METADATA_GLUE_GRAPH is set, which would record one batch's spans for all batches")
    return reasons
