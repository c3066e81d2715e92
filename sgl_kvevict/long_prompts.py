"""How many token slots a prompt holds that is longer than the pool, and compressed while it is prefilled."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from sgl_kvevict.config import KVEvictConfig

CHUNKS_PER_POOL = 8
"""A chunk takes at most this part of the pool, or ``min_prefix_tokens``: the rest is for what lies before."""


@dataclass(frozen=True)
class LongPrompts:
    """Arithmetic of prompts whose chunks shrink before the next one is computed.

    Before a chunk is allocated, everything before it can be at the least share, except fewer than ``min_prefix_tokens``
    tokens that are too few to compress. Sizes are upper bounds: each segment may round up by one slot.

    Attributes:
        num_slots: token slots of the pool.
        chunk: most tokens of one chunk.
    """

    config: KVEvictConfig
    num_slots: int
    chunk: int

    @classmethod
    def of(cls, config: KVEvictConfig, num_slots: int, chunked_prefill_size: int | None) -> LongPrompts | None:
        """None where no prompt may be longer than the pool: nothing shrinks, or prompts are not prefilled in chunks.

        Entries of a chunk are kept by learned scores, so by policy ``distilled``.
        """
        if config.policy != "distilled" or chunked_prefill_size is None:
            return None
        chunk = min(chunked_prefill_size, max(num_slots // CHUNKS_PER_POOL, config.min_prefix_tokens))
        plan = cls(config, num_slots, chunk)
        return plan if plan.longest() > num_slots else None

    @property
    def _whole(self) -> int:
        """Tokens that are uncompressed at the same time, at most."""
        return self.config.min_prefix_tokens + self.chunk

    def slots_at_peak(self, num_tokens: int, share: float | None = None) -> int:
        """Token slots that a prompt holds at most while it is prefilled, and shrinks to a share (None: the least)."""
        rest = num_tokens - self._whole
        if rest <= 0:
            return num_tokens
        packed = self.config.num_slots(rest, share=self.config.shares[-1] if share is None else share)
        # No segment is shorter than ``min_prefix_tokens``, which bounds how many slots rounding takes.
        return self._whole + packed + rest // self.config.min_prefix_tokens

    def longest(self, num_new: int = 1) -> int:
        """Tokens of the longest prompt that can be answered with ``num_new`` tokens."""
        room = self.num_slots - num_new - 2  # SGLang keeps one slot, and a request takes one more than its tokens
        # Sizes grow with the prompt, so the largest that fits is found by halving. 1,000 pools are more than a
        # ``min_budget`` of 0.001 makes room for.
        return bisect_right(range(1, 1000 * self.num_slots), room, key=self.slots_at_peak)

    def affordable_share(self, num_tokens: int, num_new: int) -> float:
        """Share of its compressed tokens that a prompt can keep in an empty pool; 0.0 if none, to three decimals."""
        rest = max(num_tokens - self._whole, 1)
        room = self.num_slots - num_new - 2 - self._whole - rest // self.config.min_prefix_tokens
        # Rounded down: a share that is shown, or used, must fit.
        return max(math.floor(1000 * room / rest) / 1000, 0.0)
