"""What a scorer can ask for beyond the range's own keys and values, and the shapes in which it comes.

A new signal is named here and collected by one class in ``sgl_kvevict/compression/collectors.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Signal(Enum):
    """What a policy needs to see; the adapter refuses at start-up what it cannot provide."""

    WINDOW_QUERIES = "window_queries"
    """:class:`QueryWindow`: the last ``window_size`` queries of the prompt, after RoPE, with their log-sum-exp."""
    ACCUMULATED_ATTENTION = "accumulated_attention"
    """Per token: the attention of all queries that saw it, summed; mean over the query heads of a group."""
    WINDOW_KEYS = "window_keys"
    """Tensor [window, num_kv_heads, head_dim], after RoPE, of the tokens whose queries the window holds: a range ends
    before them."""
    QUERY_MOMENTS = "query_moments"
    """``QueryMoments``: per query head, mean and covariance of all queries before RoPE: the same size for any
    length."""
    READER_ATTENTION = "reader_attention"
    """Per token: the root of the summed squares of the attention that its readers' queries paid it, over the query
    heads of a group too; who reads, :class:`Readers` says."""
    ECHO_ATTENTION = "echo_attention"
    """Per token: the largest attention that the prompt's own queries would pay it, moved behind it."""
    LEARNED_SCORES = "learned_scores"
    """Per token: what weights learned from scoring passes expect of it; not there before they are."""
    OUTPUT_GRAM = "output_gram"
    """Tensor [num_kv_heads, head_dim, head_dim], float32, ``output_gram`` of the layer: gives norms of values as
    the layer adds them."""
    KEYS = "keys"
    """The keys of the range, read from the pool."""
    VALUES = "values"
    """The values of the range, read from the pool."""


class Readers(Enum):
    """Whose queries make :attr:`Signal.READER_ATTENTION`. They come after the range, so it is compressed later."""

    REPETITION = "repetition"
    """Extra passes in which the model repeats the prefix."""
    QUESTIONS = "questions"
    """Requests that extend the prefix, as they come; or questions given with the prefix."""


@dataclass(frozen=True)
class QueryWindow:
    """The last queries of a prompt in one layer.

    Attributes:
        queries: [window, num_qo_heads, head_dim], after RoPE.
        lse: [window, num_qo_heads], float32, natural log-sum-exp over all keys each query saw.
        start: logical position of ``queries[0]``.
    """

    queries: Tensor
    lse: Tensor
    start: int

    @property
    def end(self) -> int:
        """Logical position after the last query."""
        return self.start + self.queries.shape[0]

    def last(self, count: int) -> QueryWindow:
        """The last ``count`` queries (all of them when there are fewer)."""
        skip = max(self.queries.shape[0] - count, 0)
        return QueryWindow(self.queries[skip:], self.lse[skip:], self.start + skip)
