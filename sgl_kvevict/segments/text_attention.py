"""Attention that repetitions of a text pay its tokens: what scores are learned from."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.key_scores import accumulated_attention
from sgl_kvevict.geometry import KVGeometry


class TextAttention:
    """Sums up the squared attention that queries after a text pay its tokens, over any number of requests.

    Layers with a sliding window are skipped.

    Attributes:
        sums: [num_layers, num_kv_heads, num_tokens], float32.
        has_failed: an error made the sums unusable.
    """

    def __init__(self, geometry: KVGeometry, num_tokens: int, device: torch.device) -> None:
        self.sums = torch.zeros(geometry.num_layers, geometry.num_kv_heads, num_tokens, device=device)
        self.has_failed = False
        self._geometry = geometry
        self._query_start = 0
        self._token_slots = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def num_tokens(self) -> int:
        """Length of the text; queries before its end compute it again, and are not counted."""
        return self.sums.shape[-1]

    def begin_chunk(self, query_start: int, token_slots: Tensor) -> None:
        """Announce queries from a logical position on; ``token_slots``, [num_tokens], int64, are those of the text."""
        self._query_start, self._token_slots = query_start, token_slots

    def record(self, layer: int, queries: Tensor, lse: Tensor, k_buffer: Tensor, sm_scale: float) -> None:
        """Add one layer of the chunk; arguments as in :class:`~sgl_kvevict.segments.collectors.Chunk`."""
        if self._geometry.window(layer):
            return
        skipped = max(self.num_tokens - self._query_start, 0)
        self.sums[layer] += accumulated_attention(
            # These compute the text again; what comes after it repeats it.
            queries[skipped:].contiguous(),
            lse[skipped:].contiguous(),
            k_buffer,
            self._token_slots,
            sm_scale=sm_scale * self._geometry.scales.of(layer)[0],
            key_start=0,
            query_start=self._query_start + skipped,
            reduction="squares",
        )
