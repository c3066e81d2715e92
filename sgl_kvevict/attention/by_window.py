"""Layers with a sliding window by one implementation, the others by another."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.interface import Attention, CompiledAttention
from sgl_kvevict.geometry import KVGeometry


class ByWindow:
    """Attention of a model with windows in some layers, by an implementation that reads spans only whole.

    In such a layer the first visible entry of a span differs for every query and step. FlashInfer would need a mask for
    each layer and step; our Triton kernels read positions.

    Args:
        full: for layers that see everything; its geometry has no windows.
        windowed: for the others, over the same arena.

    Attributes:
        geometry: of all layers.
    """

    def __init__(self, full: Attention, windowed: CompiledAttention) -> None:
        self.geometry: KVGeometry = windowed.geometry
        self._full = full
        self._windowed = windowed

    def warm_up(self, sink_dtype: torch.dtype | None = None) -> None:
        """Launch the kernels of layers with a window; see :meth:`CompiledAttention.warm_up`."""
        self._windowed.warm_up(sink_dtype)

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare the layers of one forward; see :meth:`Attention.plan`."""
        self._full.plan(batch)
        self._windowed.plan(batch)

    def run(self, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend as planned; see :meth:`Attention.run`."""
        chosen = self._windowed if self.geometry.window(layer) else self._full
        return chosen.run(layer, q, sm_scale, sink_logits)
