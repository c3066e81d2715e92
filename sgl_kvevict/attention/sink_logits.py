"""Sink logits: one more score in every query's softmax, which takes weight and has the value 0."""

from __future__ import annotations

import torch
from torch import Tensor


def with_sink_logits(out: Tensor, lse: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add the sink logits [num_qo_heads] (any floating dtype) to a finished softmax; None: nothing changes.

    ``out`` is [num_new_tokens, num_qo_heads, head_dim], ``lse`` [num_new_tokens, num_qo_heads] (float32, natural); so
    are the results.
    """
    if sink_logits is None:
        return out, lse
    total = torch.logaddexp(lse, sink_logits.float())
    return (out.float() * torch.exp(lse - total)[..., None]).to(out.dtype), total
