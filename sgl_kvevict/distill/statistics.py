"""Sufficient statistics of ridge regressions, one for each (layer, KV head): the same size for any number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 0.003
"""Penalty on standardised features, per token."""


class RidgeStatistics:
    """Sums of products of features with each other and with the target, in float64.

    Args:
        num_layers: layers.
        num_heads: KV heads of a layer.
        num_features: columns; ``constant`` among them is 1 for every token.
        constant: that column.
        device: where the sums are kept.
    """

    def __init__(
        self, num_layers: int, num_heads: int, num_features: int, constant: int, device: torch.device | None = None
    ) -> None:
        shape = (num_layers, num_heads, num_features)
        self.constant = constant
        self._gram = torch.zeros(*shape, num_features, dtype=torch.float64, device=device)
        self._cross = torch.zeros(shape, dtype=torch.float64, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return (self._gram.numel() + self._cross.numel()) * 8

    def add(self, layer: int, features: Tensor, targets: Tensor) -> None:
        """Add tokens of one layer.

        Args:
            layer: layer index.
            features: [num_heads, num_tokens, num_features].
            targets: [num_heads, num_tokens].
        """
        columns = features.double()
        self._gram[layer].baddbmm_(columns.mT, columns)
        self._cross[layer] += (columns.mT @ targets.double().unsqueeze(-1)).squeeze(-1)

    def solve(self, layer: int, num_columns: int) -> Tensor:
        """Weights of one layer by ridge regression on standardised features; the constant is not penalised.

        Args:
            layer: layer index; at least one token was added to it.
            num_columns: of the first so many features; the constant must be one of them.

        Returns:
            [num_heads, num_columns], float32.
        """
        gram = self._gram[layer, :, :num_columns, :num_columns]
        count = gram[:, self.constant, self.constant, None]
        mean = gram[:, self.constant] / count
        target_mean = self._cross[layer, :, self.constant, None] / count
        centred = gram / count[..., None] - mean[:, :, None] * mean[:, None, :]
        cross = self._cross[layer, :, :num_columns] / count - mean * target_mean
        deviation = centred.diagonal(dim1=-2, dim2=-1).clamp_min(1e-10).sqrt()
        standard = centred / (deviation[:, :, None] * deviation[:, None, :])
        standard.diagonal(dim1=-2, dim2=-1).add_(RIDGE)
        weights: Tensor = torch.linalg.solve(standard, cross / deviation) / deviation
        weights[:, self.constant] = target_mean[:, 0] - (mean * weights).sum(-1)
        return weights.float()
