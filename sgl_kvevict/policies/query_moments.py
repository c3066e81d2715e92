"""Mean and covariance of a layer's queries before RoPE: what ExpectedAttention keeps of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

QUERIES_PER_BLOCK = 512
"""Bounds the memory of float32 copies while moments are added up."""


@dataclass(frozen=True)
class Rotary:
    """A model's rotary embedding, as SGLang caches it.

    Attributes:
        cos_sin: [num_positions, rotary_dim], cosines in the first half of the columns, sines in the second.
        is_neox: rotation pairs dimension i with i + rotary_dim / 2; otherwise 2i with 2i + 1.
    """

    cos_sin: Tensor
    is_neox: bool

    def apply(self, x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate rows to their positions, or back.

        Args:
            x: [num_tokens, num_heads, head_dim].
            positions: [num_tokens], int64.
            inverse: rotate by the negative angle.

        Returns:
            [num_tokens, num_heads, head_dim], float32; dimensions past ``rotary_dim`` unchanged.
        """
        cos, sin = self.cos_sin[positions].float().chunk(2, dim=-1)
        return self._rotate(x.float(), cos[:, None], -sin[:, None] if inverse else sin[:, None])

    def mean_rotation(self, start: int, count: int, head_dim: int) -> Tensor:
        """Average of the rotation matrices of positions ``[start, start + count)``.

        Returns:
            [head_dim, head_dim], float32; ``matrix @ q`` rotates a column ``q``. Positions past the cached
            table are left out (at least its last row is used).
        """
        limit = self.cos_sin.shape[0]
        start = min(start, limit - 1)
        rows = self.cos_sin[start : min(start + count, limit)].float().mean(0)
        cos, sin = rows.chunk(2)
        eye = torch.eye(head_dim, device=rows.device)
        return self._rotate(eye[:, None], cos[None, None], sin[None, None])[:, 0].T

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = 2 * cos.shape[-1]
        rotated, rest = x[..., :width], x[..., width:]
        if self.is_neox:
            a, b = rotated.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = rotated[..., ::2], rotated[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((turned, rest), dim=-1)


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
