"""Mean and covariance of a layer's queries before RoPE: what ExpectedAttention keeps of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
    """

    count: int
    total: Tensor
    outer: Tensor
    rotary: Rotary

    @staticmethod
    def empty(num_qo_heads: int, head_dim: int, rotary: Rotary) -> QueryMoments:
        """Moments of no query."""
        device = rotary.cos_sin.device
        total = torch.zeros(num_qo_heads, head_dim, device=device)
        return QueryMoments(0, total, torch.zeros(num_qo_heads, head_dim, head_dim, device=device), rotary)

    def add(self, queries: Tensor, positions: Tensor) -> QueryMoments:
        """Moments with more queries counted in.

        Args:
            queries: [num_tokens, num_qo_heads, head_dim], after RoPE.
            positions: [num_tokens], int64, their logical positions.
        """
        plain = self.rotary.apply(queries, positions, inverse=True)
        outer = torch.einsum("nhd,nhe->hde", plain, plain)
        return QueryMoments(
            self.count + queries.shape[0], self.total + plain.sum(0), self.outer + outer, self.rotary
        )

    @property
    def mean(self) -> Tensor:
        """[num_qo_heads, head_dim], float32."""
        return self.total / max(self.count, 1)

    @property
    def covariance(self) -> Tensor:
        """[num_qo_heads, head_dim, head_dim], float32, population covariance."""
        mean = self.mean
        return self.outer / max(self.count, 1) - mean[:, :, None] * mean[:, None, :]
