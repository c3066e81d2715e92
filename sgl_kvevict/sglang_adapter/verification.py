"""Verification steps of speculative decoding: which draft tokens a request has, and what each of them sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def visible_drafts(mask: Tensor, seq_lens: Tensor, num_drafts: int) -> Tensor:
    """:attr:`AttentionBatch.visible` of a batch of trees; no host sync.

    Args:
        mask: bool, SGLang's ``custom_mask``: request after request [num_drafts, seq_len + num_drafts], or
            [num_drafts, num_drafts] for all of them.
        seq_lens: [num_requests], int, tokens before the drafts.
        num_drafts: draft tokens of each request, at most 64.

    Returns:
        [num_requests * num_drafts], int64.
    """
    num_requests, node = seq_lens.numel(), torch.arange(num_drafts, device=mask.device)
    if mask.numel() == num_requests * num_drafts**2:
        trees = mask.view(num_requests, num_drafts, num_drafts)
    else:
        widths = seq_lens.long() + num_drafts
        starts = num_drafts * (widths.cumsum(0) - widths) + seq_lens
        trees = mask[starts[:, None, None] + node[:, None] * widths[:, None, None] + node]
    return (trees.long() << node).sum(-1).view(-1)


def drafts_of(forward_batch: ForwardBatch) -> tuple[int, Tensor | None]:
    """Draft tokens of each request in a verification step, and what each of them sees (None: those before it)."""
    spec = forward_batch.spec_info
    num_drafts: int = spec.draft_token_num
    if spec.custom_mask is None:
        return num_drafts, None
    return num_drafts, visible_drafts(spec.custom_mask, forward_batch.seq_lens, num_drafts)
