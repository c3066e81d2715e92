"""What layers with a window give up when a segment is squeezed: what the fewest readers see."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.transfer import to_device
from sgl_kvevict.prefix.span import Segment


def in_windows(keys: Tensor, segment: Segment, share: int) -> Tensor:
    """Let layers with a window keep the segment's last tokens, as many as readers see or their share allows.

    Args:
        keys: [num_entries], int32, what the entries of the other layers compete by.
        segment: that is squeezed; it cannot be split, so whoever reads it comes after its end.
        share: entries that each head may keep, if all keep the same.

    Returns:
        Like ``keys``: the largest number for what such layers keep, the smallest for their other entries.
    """
    geometry = segment.geometry
    reach = to_device(torch.tensor(geometry.windows).sub_(1).clamp_(max=share), keys.device)
    runs = torch.repeat_interleave(segment.indptr.diff().long(), output_size=segment.num_entries)
    reach = reach[runs // geometry.num_kv_heads]  # -1: no window
    bounds = torch.iinfo(keys.dtype)
    kept = torch.where(segment.positions >= segment.end - reach, bounds.max, bounds.min).to(keys.dtype)
    return torch.where(reach < 0, keys, kept)
