"""Random numbers, and statistics of keys and values for tests of rows of 4 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.row_codec import RowCoding, RowStatistics
from sgl_kvevict.geometry import KVGeometry


def random_coding(geometry: KVGeometry, arena: Tensor) -> RowCoding:
    """With what an arena's rows of 4 bits are written, by statistics of no model: any numbers will do."""
    random = torch.Generator().manual_seed(7)
    shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
    means, scales = torch.randn(2, *shape, generator=random), torch.rand(2, *shape, generator=random) + 0.5
    return RowCoding.of(arena, RowStatistics(means[0], scales[0], means[1], scales[1]))


def normal(seed: int, *shape: int) -> Tensor:
    """Numbers that are the same wherever they are asked for."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
