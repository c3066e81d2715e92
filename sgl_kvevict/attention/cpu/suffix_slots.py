"""The token slots of what a request has of its own, behind its spans."""

from __future__ import annotations

import torch
from torch import Tensor


def look_up_slots(
    begins: Tensor, ends: Tensor, count: int, rows: Tensor, req_to_token: Tensor
) -> tuple[Tensor, Tensor]:
    """Look up ``count`` token slots from each beginning on; behind the end, the newest token's slot fills up.

    Args:
        begins: [n], int64, first positions.
        ends: [n], int64, positions after the last ones.
        count: slots per beginning.
        rows: [n], int, rows of ``req_to_token``.
        req_to_token: [num_rows, max_context_len], int32.

    Returns:
        slots [n, count], int32, and mask [n, count], float32: 0 for tokens, -inf for fillers.
    """
    position = begins[:, None] + torch.arange(count)
    last = ends[:, None] - 1
    place = rows.long()[:, None] * req_to_token.shape[1] + torch.minimum(position, last)
    slots = req_to_token.reshape(-1).index_select(0, place.view(-1)).view(place.shape)
    return slots, torch.where(position > last, float("-inf"), 0.0)
