"""Mean and covariance of a layer's queries before RoPE: what ExpectedAttention keeps of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvevict_kernels.rotary import Rotary

QUERIES_PER_BLOCK = 512
"""Bounds the memory of float32 copies while moments are added up."""


@dataclass(frozen=True)
class QueryMoments:
    """Running first and second moments of one layer's queries before RoPE; ``add`` returns a new object.

    Attributes:
        count: queries seen.
        total: [num_qo_heads, head_dim], float32, sum of the queries.
        outer: [num_qo_heads, head_dim, head_dim], float32, sum of their outer products.
        rotary: the model's rotary embedding.
        num_skipped: first positions of a prompt that are not counted: their queries are outliers.
    """

    count: int
    total: Tensor
    outer: Tensor
    rotary: Rotary
    num_skipped: int = 4

    @staticmethod
    def empty(num_qo_heads: int, head_dim: int, rotary: Rotary, num_skipped: int = 4) -> QueryMoments:
        """Moments of no query."""
        device = rotary.cos_sin.device
        total = torch.zeros(num_qo_heads, head_dim, device=device)
        outer = torch.zeros(num_qo_heads, head_dim, head_dim, device=device)
        return QueryMoments(0, total, outer, rotary, num_skipped)

    def add(self, queries: Tensor, start: int) -> QueryMoments:
        """Moments with the queries of one chunk of one prompt counted in.

        Args:
            queries: [num_tokens, num_qo_heads, head_dim], after RoPE, of consecutive positions.
            start: logical position of the first one.
        """
        skip = min(max(self.num_skipped - start, 0), queries.shape[0])
        total, outer = self.total.clone(), self.outer.clone()
        for begin in range(skip, queries.shape[0], QUERIES_PER_BLOCK):
            block = queries[begin : begin + QUERIES_PER_BLOCK]
            positions = torch.arange(start + begin, start + begin + block.shape[0], device=queries.device)
            plain = self.rotary.apply(block, positions, inverse=True).transpose(0, 1)
            total += plain.sum(1)
            outer.baddbmm_(plain.transpose(1, 2), plain)
        return replace(self, count=self.count + queries.shape[0] - skip, total=total, outer=outer)

    @property
    def mean(self) -> Tensor:
        """[num_qo_heads, head_dim], float32."""
        return self.total / max(self.count, 1)

    @property
    def covariance(self) -> Tensor:
        """[num_qo_heads, head_dim, head_dim], float32, population covariance."""
        mean = self.mean
        return self.outer / max(self.count, 1) - mean[:, :, None] * mean[:, None, :]
