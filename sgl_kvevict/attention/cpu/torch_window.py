"""New tokens of one request in a layer with a window: blocks of queries, each with the keys that it may see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

QUERY_BLOCK = 256
"""Queries of a call. Its keys are those of a window and as many again; the mask has an element for each pair."""


@dataclass(frozen=True)
class QueryBlock:
    """Some consecutive new tokens of a request.

    Attributes:
        begin: the first of them among the new tokens.
        num_queries: how many.
        first: position of the first of them.
        window: tokens that each sees, itself included.
    """

    begin: int
    num_queries: int
    first: int
    window: int

    @property
    def rows(self) -> slice:
        """Which of the new tokens."""
        return slice(self.begin, self.begin + self.num_queries)

    @property
    def oldest(self) -> int:
        """The first position that any of them sees."""
        return max(self.first - self.window + 1, 0)

    @property
    def end(self) -> int:
        """The position behind the last of them."""
        return self.first + self.num_queries

    def mask(self, key_positions: Tensor) -> Tensor:
        """What is added to the scores, [1, 1, num_queries, num_keys], float32: 0 for what a query sees, else -inf."""
        distance = torch.arange(self.first, self.end)[:, None] - key_positions
        is_seen = (distance >= 0) & (distance < self.window)
        return torch.where(is_seen, 0.0, float("-inf"))[None, None]


def query_blocks(num_new: int, first: int, window: int) -> list[QueryBlock]:
    """Cut the new tokens of a request, of which the first is at position ``first``."""
    return [
        QueryBlock(begin, min(QUERY_BLOCK, num_new - begin), first + begin, window)
        for begin in range(0, num_new, QUERY_BLOCK)
    ]
