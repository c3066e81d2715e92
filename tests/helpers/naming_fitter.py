"""A fitter of tests: values stay as they are, and every bias says to which value it belongs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kvevict.policies.parts import Fitted, Fitter


def name_of(values: Tensor) -> Tensor:
    """[...], float32, 1 to 1000, of values [..., head_dim]: the bias of entries with these values."""
    return (values[..., 0] * 7 + values[..., 1] * 31).abs().remainder(1000).float() + 1


@dataclass(frozen=True)
class NamingFitter(Fitter):
    """Fits every kept entry, in blocks of a few tokens."""

    is_causal: bool = True
    block: int = 5

    def block_len(self, num_tokens: int) -> int:
        return min(self.block, num_tokens)

    def fit(self, products: Tensor, values: Tensor, kept: Tensor) -> Fitted:
        num_heads, num_blocks, block, _ = products.shape
        assert block == self.block_len(block) and (num_blocks - 1) * block < values.shape[1] <= num_blocks * block
        assert products.isfinite().all() and kept.shape == values.shape[:2] == (num_heads, values.shape[1])
        assert values[kept].isfinite().all()
        return Fitted(values, torch.where(kept, name_of(values), 0.0), kept)
