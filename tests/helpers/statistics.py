"""Statistics of keys and values for tests of rows of 8 and 4 bits."""

from __future__ import annotations

import torch

from kvevict_kernels.row_codec import RowStatistics
from sgl_kvevict.geometry import KVGeometry


def random_statistics(geometry: KVGeometry) -> RowStatistics:
    """Statistics of no model: any numbers will do."""
    random = torch.Generator().manual_seed(7)
    shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
    means, deviations = torch.randn(2, *shape, generator=random), torch.rand(2, *shape, generator=random) + 0.5
    return RowStatistics(means[0], deviations[0], means[1], deviations[1])
