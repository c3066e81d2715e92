"""Verification steps of speculative decoding: what each draft token sees, and how many were accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.verify_mask import TreeMaskMode, VerifyMask
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


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
    if mask.numel() == num_requests * num_drafts**2:
        trees = mask.view(num_requests, num_drafts, num_drafts)
    else:
        widths = seq_lens.long() + num_drafts
        starts = num_drafts * (widths.cumsum(0) - widths) + seq_lens
        trees = mask[starts[:, None, None] + node[:, None] * widths[:, None, None] + node]
    return (trees.long() << node).sum(-1).view(-1)


def drafts_of(spec_info: Any, seq_lens: Tensor) -> tuple[int, Tensor]:
    """Draft tokens of each request in a verification step, and what each of them sees; see :func:`visible_drafts`."""
    num_drafts: int = spec_info.draft_token_num
    return num_drafts, visible_drafts(spec_info.custom_mask, seq_lens, num_drafts)


class Acceptance:
    """Verification steps of requests that have finished, and the tokens that these gave, by what the requests read."""

    def __init__(self) -> None:
        self._counts = {"compressed": [0, 0], "uncompressed": [0, 0]}

    def count(self, req: Req, *, reads_spans: bool) -> None:
        """Add a finished request."""
        counts = self._counts["compressed" if reads_spans else "uncompressed"]
        counts[0] += req.spec_verify_ct
        counts[1] += req.spec_verify_ct + req.spec_num_correct_drafts

    def state(self) -> dict[str, dict[str, float]]:
        """Steps, and tokens per step, of requests that read compressed prefixes and of others; {} before the first."""
        return {
            name: {"steps": steps, "acceptance_length": round(tokens / steps, 3)}
            for name, (steps, tokens) in self._counts.items()
            if steps
        }
