"""Signals: the data that scorers read, and their shapes.

Signals of a prefill are collected in ``sgl_kvevict/segments/collectors.py``, one class each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from kvevict_kernels.rotary import Rotary

QUERIES_PER_BLOCK = 512
"""Bounds the memory of float32 copies in :meth:`QueryMoments.add`."""


class Signal(Enum):
    """Data that a policy reads; a server that cannot provide a needed signal refuses to start."""

    WINDOW_QUERIES = "window_queries"
    """:class:`QueryWindow`: the last ``window_size`` queries of the prompt, after RoPE, with their log-sum-exp."""
    ACCUMULATED_ATTENTION = "accumulated_attention"
    """Per token: attention summed over all queries that saw it; mean over the query heads of a group."""
    WINDOW_KEYS = "window_keys"
    """Tensor [window, num_kv_heads, head_dim], after RoPE: keys of the window's tokens."""
    QUERY_MOMENTS = "query_moments"
    """:class:`QueryMoments`: mean and covariance of all queries before RoPE; the same size for any length."""
    READER_ATTENTION = "reader_attention"
    """Per token: 2-norm of the attention of the queries of scoring passes, over queries and the group's heads. Passes
    repeat the prefix, or ask questions given with it; they follow the range, so it is compressed later."""
    LEARNED_SCORES = "learned_scores"
    """Per token: predicted log of reader attention, or joint scores; absent where given questions were read."""
    OUTPUT_GRAM = "output_gram"
    """Tensor [num_kv_heads, head_dim, head_dim], float32: :func:`output_gram` of the layer."""
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


@dataclass(frozen=True)
class QueryMoments:
    """First and second moments of one layer's queries before RoPE; immutable.

    Attributes:
        total: [num_qo_heads, head_dim], float32, sum of ``count`` queries.
        outer: [num_qo_heads, head_dim, head_dim], float32, sum of their outer products.
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
        """Moments with the queries of a chunk, [num_tokens, num_qo_heads, head_dim], after RoPE, added."""
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


def output_gram(weight: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """[num_kv_heads, head_dim, head_dim], float32: Gram matrix of the output projection of each KV head's query heads.

    ``v @ gram @ v`` is the squared norm of a value's contribution to the residual stream. ``weight`` is
    [hidden_size, num_qo_heads * head_dim], any float dtype.
    """
    by_head = weight.detach().float().t().reshape(num_kv_heads, -1, head_dim, weight.shape[0])
    return torch.einsum("hgdo,hgeo->hde", by_head, by_head)
