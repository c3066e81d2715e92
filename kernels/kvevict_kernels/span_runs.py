"""One compressed span as attention reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class SpanRuns:
    """One compressed span as attention reads it. Immutable; compared and hashed by identity.

    Run ``(l, h)`` is ``head_slots[starts[l, h] : starts[l, h] + lens[l, h]]``.

    Attributes:
        head_slots: [segment_entries], int32, head slots of the whole segment (shared by all spans cut from it).
        starts: [num_layers, num_kv_heads], int32, first entry of each run.
        lens: [num_layers, num_kv_heads], int32, entries of each run; may be 0.
        num_tokens: logical tokens the span stands for.
        is_fitted: its entries have biases, which are added to their scores; those of other spans' head slots are 0.
        positions: [segment_entries], int32, logical position of each entry's token, ascending within a run; None: not
            known, and only layers without a window may read it.
    """

    head_slots: Tensor
    starts: Tensor
    lens: Tensor
    num_tokens: int
    is_fitted: bool = False
    positions: Tensor | None = None


class StandsForTokens(Protocol):
    """A span, or what attention reads of it."""

    @property
    def num_tokens(self) -> int:
        """Logical tokens it stands for."""


def waterline_of(path: Iterable[StandsForTokens]) -> int:
    """Tokens that the spans of a path stand for: those from here on lie in token slots of their own."""
    return sum(span.num_tokens for span in path)
