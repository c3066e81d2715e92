"""Learns by which means and scales a model's keys and values are normalised before they are written in 4 bits."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from kvevict_kernels.rotary import Rotary
from kvevict_kernels.row_codec import RowStatistics
from kvevict_kernels.stored_rows import gather_rows
from sgl_kvevict.distill.features import CachedRange
from sgl_kvevict.distill.learner import NUM_SINKS
from sgl_kvevict.geometry import KVGeometry

STATISTICS = tuple(field.name for field in fields(RowStatistics))
"""Names of the tensors of statistics."""
MIN_SHARE = 0.01
"""Least deviation of a channel, and least size of its queries, as a share of the mean of its head: one that never
varied in the texts may vary later."""
SPREAD_POSITIONS = 32_768
"""Keys count as they would be at positions up to here, evenly: texts are short, and RoPE turns keys of later tokens
further. At most as many as the model has."""
_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are evenly spread however many there are."""
_TINY = 1e-6
"""Least deviation of a channel whose head never varied."""


class RowSums:
    """Sums over tokens of queries and keys after RoPE and of values, by layer, KV head and channel, in float64.

    The first tokens of a path, attention sinks, are left out of keys and values: nothing else is like them, and their
    rows have 16 bits. The size is constant. Every rank sums up its own heads.

    Attributes:
        has_failed: an error made the sums of queries unusable.
    """

    def __init__(self, geometry: KVGeometry, rotary: Rotary, device: torch.device | None = None) -> None:
        shape = (2, geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)  # of keys, of values
        self.has_failed = False
        self._rotary = rotary
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self._squares = torch.zeros(shape, dtype=torch.float64, device=device)
        self._num_tokens = 0
        self._of_queries = torch.zeros(shape[1:], dtype=torch.float64, device=device)

    def record(self, layer: int, queries: Tensor, lse: Tensor, k_buffer: Tensor, sm_scale: float) -> None:
        """Add queries of one layer; arguments as in :class:`~sgl_kvevict.segments.collectors.Chunk`."""
        # Queries count where they are: turned to further positions, as keys are, they gave worse scales.
        of_heads = queries.double().square().view(queries.shape[0], self._of_queries.shape[1], -1, queries.shape[2])
        self._of_queries[layer] += of_heads.mean(2).sum(0)

    def add(self, text: CachedRange) -> None:
        """Add the uncompressed tokens of a path, not latents."""
        tokens = text.cut(slice(min(max(NUM_SINKS - text.start, 0), text.token_slots.numel()), None))
        now = tokens.rotary_positions
        then = self._spread(tokens).expand_as(now)
        for layer in range(tokens.num_layers):
            k_scale, v_scale = tokens.scales.of(layer)
            keys = gather_rows(tokens.k_arena[layer], tokens.token_slots, k_scale)
            keys = self._rotary.apply(self._rotary.apply(keys, now, inverse=True), then)
            values = gather_rows(tokens.v_arena[layer], tokens.token_slots, v_scale)
            for kind, rows in enumerate((keys.double(), values.double())):
                self._sums[kind, layer] += rows.sum(0)
                self._squares[kind, layer] += rows.square_().sum(0)
        self._num_tokens += tokens.token_slots.numel()

    def _spread(self, tokens: CachedRange) -> Tensor:
        """[num_tokens], int64: positions to which keys of the next tokens are turned."""
        numbers = torch.arange(tokens.token_slots.numel(), device=tokens.token_slots.device) + self._num_tokens
        num_positions = min(self._rotary.cos_sin.shape[0], SPREAD_POSITIONS)
        return ((numbers.double() * _GOLDEN) % 1 * num_positions).long()

    def solve(self) -> RowStatistics:
        """Means and scales of all tokens so far, at least one.

        Rounding adds the same noise to every number of a row, in proportion to the row's length. A channel of scale
        ``s`` has the noise ``s``, of which queries see ``q * s``. It adds ``(deviation / s) ** 2`` to the length. The
        product of both sums is least where ``s ** 2 = deviation / q``. Values' scales are the deviations. Scales are so
        large that rows have a mean square of 1.
        """
        means = self._sums / self._num_tokens
        # Clamped: rounding may leave the difference of two large sums below 0.
        deviations = self._above_least((self._squares / self._num_tokens - means.square()).clamp_min(0).sqrt())
        scales = deviations.clone()
        if bool(self._of_queries.any()):  # without queries nothing says what they see of the noise
            scales[0] = (deviations[0] / self._above_least(self._of_queries.sqrt())).sqrt()
        scales *= (deviations / scales).square().mean(-1, keepdim=True).sqrt()
        return RowStatistics(means[0].float(), scales[0].float(), means[1].float(), scales[1].float())

    @staticmethod
    def _above_least(sizes: Tensor) -> Tensor:
        """Sizes of channels, none below its share of the head's mean."""
        return torch.maximum(sizes, MIN_SHARE * sizes.mean(-1, keepdim=True)).clamp_min(_TINY)
