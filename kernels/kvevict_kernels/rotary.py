"""A model's rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    def turn_of(self, positions: Tensor, head_dim: int) -> Turn:
        """The rotation of rows of ``head_dim`` numbers to ``positions`` (int64, as in :meth:`rows`)."""
        cos, sin = self.rows(positions).chunk(2, dim=-1)
        turn, half, start = Turn.none(head_dim, sin.device, sin.shape[0]), sin.shape[1], self.start
        end = start + 2 * half
        if self.is_neox:
            first, second = slice(start, start + half), slice(start + half, end)
        else:
            first, second = slice(start, end, 2), slice(start + 1, end, 2)
        columns = turn.partner.clone()
        turn.partner[first], turn.partner[second] = columns[second], columns[first]
        turn.cos[:, first] = turn.cos[:, second] = cos
        turn.sin[:, first], turn.sin[:, second] = -sin, sin
        return turn

    def apply(self, x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate rows [num_tokens, num_heads, head_dim] to ``positions`` (int64, as in :meth:`rows`), or back.

        Returns float32; columns that are not rotated are unchanged.
        """
        turn = self.turn_of(positions, x.shape[-1])
        return (replace(turn, sin=-turn.sin) if inverse else turn).apply(x.float())


@dataclass(frozen=True)
class Turn:
    """A rotation of rows: each number times its cosine, plus the number that it is rotated with times its sine."""

    cos: Tensor  # [num_tokens, head_dim], float32; one row, if all tokens have the same
    sin: Tensor  # likewise, with its sign
    partner: Tensor  # [head_dim], int64: the column that each one is rotated with

    @classmethod
    def none(cls, head_dim: int, device: torch.device, num_tokens: int = 1) -> Turn:
        """A rotation that changes nothing."""
        shape = num_tokens, head_dim
        return cls(
            torch.ones(shape, device=device), torch.zeros(shape, device=device), torch.arange(head_dim, device=device)
        )

    def cut(self, part: slice) -> Turn:
        """That of some of the tokens."""
        return self if self.cos.shape[0] == 1 else replace(self, cos=self.cos[part], sin=self.sin[part])

    def partners(self, rows: Tensor) -> Tensor:
        """What each number of [..., head_dim] is rotated with."""
        return rows.index_select(-1, self.partner)

    def apply(self, rows: Tensor) -> Tensor:
        """Rotate [..., num_tokens, num_heads, head_dim], float32; one token's rows go to all positions."""
        return torch.mul(rows, self.cos[:, None]).addcmul_(self.partners(rows), self.sin[:, None])
