"""Two implementations in one model: for layers with a sliding window, and for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.interface import Attention, CompiledAttention
from sgl_kvevict.geometry import KVGeometry


class ByWindow:
    """Attention of a model with windows in some layers, where ``full`` can only read whole spans.

    In a layer with a window the first visible entry of a span differs per query and step. FlashInfer would need a mask
    per layer and step; our Triton kernels read positions.

    Args:
        full: for layers without a window; its geometry has no windows.
        windowed: for the others, over the same arena; its geometry has all layers.
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
