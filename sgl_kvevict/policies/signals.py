"""Signals: the data that scorers read, and their shapes.

Signals of a prefill are collected in ``sgl_kvevict/segments/collectors.py``, one class each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class Signal(StrEnum):
    """Data that a policy reads; a server that cannot provide a needed signal refuses to start."""

    WINDOW_QUERIES = "window_queries"
    """:class:`QueryWindow`: the last ``window_size`` queries of the prompt, after RoPE, with their log-sum-exp."""
    ACCUMULATED_ATTENTION = "accumulated_attention"
    """Per token: attention summed over all queries that saw it; mean over the query heads of a group."""
    WINDOW_KEYS = "window_keys"
    """Tensor [window, num_kv_heads, head_dim], after RoPE: keys of the window's tokens."""
    LEARNED_SCORES = "learned_scores"
    """Per token: predicted logarithm of the attention that later queries pay (:mod:`sgl_kvevict.distill`)."""
    KEYS = "keys"
    """The keys of the range, read from the pool."""
    VALUES = "values"
    """The values of the range, read from the pool."""


@dataclass(frozen=True)
class QueryWindow:
    """The last queries of a prompt in one layer; ``start`` is the logical position of the first.

    Attributes:
        queries: [window, num_qo_heads, head_dim], after RoPE.
        lse: [window, num_qo_heads], float32, natural log-sum-exp over all keys the query saw.
    """

    queries: Tensor
    lse: Tensor
    start: int

    @property
    def end(self) -> int:
        """Logical position after the last query."""
        return self.start + self.queries.shape[0]

    def last(self, count: int) -> QueryWindow:
        """The last ``count`` queries, or all if there are fewer."""
        skip = max(self.queries.shape[0] - count, 0)
        return QueryWindow(self.queries[skip:], self.lse[skip:], self.start + skip)
