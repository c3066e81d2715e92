"""Squeezing layers with a sliding window: they keep the last tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.transfer import to_device
from sgl_kvevict.prefix.span import Segment


def in_windows(keys: Tensor, segment: Segment, share: int) -> Tensor:
    """Let layers with a window keep the segment's last tokens: those inside the window, at most their share.

    Args:
        keys: [num_entries], int32, by which entries of other layers compete.
        segment: to squeeze. It cannot be split, so all readers come after its end.
        share: entries per head, if all keep the same.

    Returns:
        Like ``keys``: the largest number for entries that such layers keep, the smallest for their others.
    """
    geometry = segment.geometry
    reach = to_device(torch.tensor(geometry.windows).sub_(1).clamp_(max=share), keys.device)
    reach = reach[segment.run_of_entries() // geometry.num_kv_heads]  # -1: no window
    bounds = torch.iinfo(keys.dtype)
    kept = torch.where(segment.positions >= segment.end - reach, bounds.max, bounds.min).to(keys.dtype)
    return torch.where(reach < 0, keys, kept)
