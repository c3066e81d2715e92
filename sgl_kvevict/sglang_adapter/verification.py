"""Verification steps of speculative decoding: what each draft token sees."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.verify_mask import TreeMaskMode, VerifyMask
from torch import Tensor

MASKS = VerifyMask(torch.empty(0, dtype=torch.bool), TreeMaskMode.QLEN_ONLY, max_bs=0)
"""Asks SGLang for masks among drafts only, in new memory each step: all drafts see what is before them."""


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
    # SGLang may build either; the sizes differ, because every prompt has a token.
    if mask.numel() == num_requests * num_drafts**2:
        trees = mask.view(num_requests, num_drafts, num_drafts)
    else:
        widths = seq_lens.long() + num_drafts
        # Trees of all requests by one index: a loop over requests would read their lengths from the device.
        starts = num_drafts * (widths.cumsum(0) - widths) + seq_lens
        trees = mask[starts[:, None, None] + node[:, None] * widths[:, None, None] + node]
    # A draft's row becomes the bits of one int64, hence at most 64 drafts.
    return (trees.long() << node).sum(-1).view(-1)


def drafts_of(spec_info: Any, seq_lens: Tensor) -> tuple[int, Tensor]:
    """Draft tokens of each request in a verification step, and what each of them sees; see :func:`visible_drafts`."""
    num_drafts: int = spec_info.draft_token_num
    return num_drafts, visible_drafts(spec_info.custom_mask, seq_lens, num_drafts)
