"""Attention matching: fits values and biases of kept entries to the attention output of the whole range."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kvevict.policies.parts import Fitted, Fitter

CAUSAL_BLOCK = 64
"""Tokens per block of a causal fit; the memory of the products is proportional to it."""
RIDGE = 1e-2
"""Penalty on changes of weights and values, as a share of the Gram matrix's mean diagonal."""
LOWEST_WEIGHT, HIGHEST_WEIGHT = math.exp(-3), math.exp(6)
NUM_STEPS = 60
"""Steps of the accelerated projected gradient."""
NUM_POWERS = 8
"""Power iterations for the step size."""
MAX_SHARE = 0.5
"""Heads that keep more than this share of their tokens are not fitted."""


@dataclass(frozen=True)
class AttentionMatcher(Fitter):
    """Least squares over readers' queries, block by block and head by head.

    Let ``p_ij`` be the attention that query ``i`` pays token ``j`` of a block, among all tokens it sees. First each
    kept token gets a weight ``w_j`` in [e^-3, e^6], whose logarithm is its bias: ``min |P w - m|^2 + RIDGE |w - 1|^2``,
    where ``m_i`` is the sum of ``p_ij`` over the block. Then it gets a value:
    ``min |P diag(w) V' - P V|^2 + RIDGE |V' - V|^2``. Both need only the products ``P' P``, so no query is kept.

    Source: attention matching (Zweiger et al. 2026, arXiv 2602.16284): biases for the mass, values for the output.
    Differs: in blocks of ``CAUSAL_BLOCK`` tokens (one block unless ``is_causal``); a query's softmax denominator is
        taken as that of all tokens, which the weights nearly restore; keys stay unchanged.
    """

    is_causal: bool = True

    def block_len(self, num_tokens: int) -> int:
        """Tokens of a range that are fitted together."""
        return min(CAUSAL_BLOCK, num_tokens) if self.is_causal else num_tokens

    def fit(self, products: Tensor, values: Tensor, kept: Tensor) -> Fitted:
        """Fit one layer; see :class:`Fitter`.

        Cost: per block two Cholesky factorisations and ``NUM_STEPS`` matrix-vector products; no host sync.
        """
        num_heads, num_blocks, block, _ = products.shape
        num_tokens, head_dim = values.shape[1:]
        more = num_blocks * block - num_tokens
        chosen = kept & (kept.sum(1, keepdim=True) <= MAX_SHARE * num_tokens)
        chosen = torch.nn.functional.pad(chosen, (0, more)).reshape(-1, block)
        rows = torch.nn.functional.pad(values, (0, 0, 0, more)).reshape(-1, block, head_dim)
        grams = products.reshape(-1, block, block)
        weights, ridge_scale = self._weights(grams, chosen)
        fitted = rows + self._changes(grams, rows, weights, chosen, ridge_scale)
        biases = torch.where(chosen, weights.clamp_min(LOWEST_WEIGHT).log(), 0.0)
        is_good = (fitted.isfinite().all(2) & biases.isfinite()).all(1, keepdim=True)
        shape = (num_heads, num_blocks * block)
        return Fitted(
            fitted.view(*shape, head_dim)[:, :num_tokens],
            biases.view(shape)[:, :num_tokens],
            (chosen & is_good).view(shape)[:, :num_tokens],
        )

    @staticmethod
    def _weights(grams: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [num_blocks, block], 0 where not chosen, and the mean diagonal [num_blocks, 1]."""
        own = grams * chosen[:, :, None] * chosen[:, None, :]
        scale = _mean_diagonal(own, chosen)
        own = own / scale[..., None]
        wanted = grams.sum(2) / scale * chosen
        weights = _solve(own, (wanted + RIDGE)[..., None], chosen).clamp_(LOWEST_WEIGHT, HIGHEST_WEIGHT)
        step = 1 / (1.05 * _largest_eigenvalue(own) + RIDGE)
        wanted, at, momentum = wanted[..., None], weights, 1.0
        for _ in range(NUM_STEPS):
            gradient = own @ at - wanted + RIDGE * (at - 1)
            moved = (at - step * gradient).clamp_(LOWEST_WEIGHT, HIGHEST_WEIGHT)
            following = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
            at = moved + (momentum - 1) / following * (moved - weights)
            weights, momentum = moved, following
        return weights[..., 0] * chosen, scale

    @staticmethod
    def _changes(grams: Tensor, rows: Tensor, weights: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
        """[num_blocks, block, head_dim]: changes of the values, 0 where not chosen."""
        grams = grams / scale[..., None]
        own = grams * weights[:, :, None] * weights[:, None, :]
        missing = grams @ rows - (grams * weights[:, None, :]) @ rows
        scale = _mean_diagonal(own, chosen)
        return _solve(own / scale[..., None], weights[..., None] * missing / scale[..., None], chosen)


def _mean_diagonal(grams: Tensor, chosen: Tensor) -> Tensor:
    """[num_blocks, 1], over chosen tokens; clamped above 0, so that blocks without attention stay 0."""
    tiny = torch.finfo(grams.dtype).tiny
    total = grams.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)
    return (total / chosen.sum(1, keepdim=True).clamp_min(1)).clamp_min(tiny)


def _solve(grams: Tensor, wanted: Tensor, chosen: Tensor) -> Tensor:
    """Solve ``(grams + RIDGE) x = wanted``, [num_blocks, block, n], for chosen tokens; 0 elsewhere."""
    ridge = torch.where(chosen, RIDGE, 1.0)
    factor, _ = torch.linalg.cholesky_ex(grams + torch.diag_embed(ridge))
    return torch.cholesky_solve(wanted * chosen[..., None], factor)


def _largest_eigenvalue(grams: Tensor) -> Tensor:
    """[num_blocks, 1, 1]: lower estimate by power iterations."""
    vector = torch.ones_like(grams[..., :1])
    norm = vector[:, :1]
    for _ in range(NUM_POWERS):
        vector = grams @ vector
        norm = vector.norm(dim=1, keepdim=True)
        vector = vector / norm.clamp_min(torch.finfo(grams.dtype).tiny)
    return norm
