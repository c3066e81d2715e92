"""A model's rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """A model's rotary embedding, as SGLang caches it."""

    cos_sin: Tensor  # [num_positions, rotary_dim]: cosines in the first half of the columns, sines in the second
    is_neox: bool  # rotation pairs dimension i with i + rotary_dim / 2; otherwise 2i with 2i + 1
    # [rotary_dim / 2], int64: axis whose position turns each pair (M-RoPE); None: one axis
    axis_of: Tensor | None = None
    start: int = 0  # first rotated column; columns outside [start, start + rotary_dim) are unchanged

    @property
    def _columns(self) -> slice:
        return slice(self.start, self.start + self.cos_sin.shape[1])

    def rows(self, positions: Tensor) -> Tensor:
        """[num_tokens, rotary_dim], float32, of ``cos_sin``.

        ``positions`` are [num_tokens], or [axes, num_tokens]: a token of an image has one in time, height and width, a
        token of text the same on all axes.
        """
        if positions.dim() == 1:
            return self.cos_sin[positions].float()
        assert self.axis_of is not None
        columns = torch.arange(self.cos_sin.shape[1], device=positions.device)
        # Twice, for the cosine and the sine of each pair.
        return self.cos_sin[positions[self.axis_of.repeat(2)].T, columns].float()

    def apply(self, x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate rows [num_tokens, num_heads, head_dim] to ``positions`` (int64, as in :meth:`rows`), or back.

        Returns float32; other columns are unchanged.
        """
        cos, sin = self.rows(positions)[:, None].chunk(2, dim=-1)
        x, sin = x.float(), -sin if inverse else sin
        a, b = self._pairs(x)
        parts = a * cos - b * sin, b * cos + a * sin
        turned = torch.cat(parts, dim=-1) if self.is_neox else torch.stack(parts, dim=-1).flatten(-2)
        columns = self._columns
        return torch.cat((x[..., : columns.start], turned, x[..., columns.stop :]), dim=-1)

    def turn(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rotate the same rows to each of several positions.

        ``rows`` is [..., 1, num_heads, head_dim], float32, before RoPE; ``positions``, int64, as in :meth:`rows`.
        Returns [..., num_tokens, num_heads, head_dim], float32, written in place, without copies of halves.
        """
        cos, sin = self.rows(positions)[:, None].chunk(2, dim=-1)
        turned = rows.new_empty(*rows.shape[:-3], positions.shape[-1], *rows.shape[-2:])
        a, b = self._pairs(rows)
        first, second = self._pairs(turned)
        # Into views of the result: `apply` would allocate halves, and join them.
        torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=second).addcmul_(a, sin)
        columns = self._columns
        for rest in (slice(0, columns.start), slice(columns.stop, None)):
            turned[..., rest] = rows[..., rest]
        return turned

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the columns that are rotated with one another."""
        rotated = x[..., self._columns]
        if self.is_neox:
            half = self.cos_sin.shape[1] // 2
            return rotated[..., :half], rotated[..., half:]
        return rotated[..., ::2], rotated[..., 1::2]
