"""Two implementations in one model: for layers with a sliding window and trees of new tokens, and for the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.interface import Attention, CompiledAttention
from sgl_kvevict.geometry import KVGeometry


class ByWindow:
    """Attention where ``plain`` reads whole spans and knows only causal masks, and ``masked`` does the rest.

    In a layer with a window the first visible entry of a span differs per query and step, and a tree of new tokens
    hides keys in the middle. FlashInfer would need a mask per layer and step; our Triton kernels read positions and
    bits.

    Args:
        plain: for layers without a window, in batches without trees; its geometry has no windows.
        masked: for everything else, over the same arena; its geometry has all layers.
    """

    def __init__(self, plain: Attention, masked: CompiledAttention) -> None:
        self.geometry: KVGeometry = masked.geometry
        self._plain = plain
        self._masked = masked
        self._is_tree = False

    def warm_up(self, sink_dtype: torch.dtype | None = None) -> None:
        """Launch the kernels with masks; see :meth:`CompiledAttention.warm_up`."""
        self._masked.warm_up(sink_dtype)

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare the layers of one forward; see :meth:`Attention.plan`."""
        self._is_tree = batch.visible is not None
        if not self._is_tree:
            self._plain.plan(batch)
        if self._is_tree or self.geometry.has_windows:
            self._masked.plan(batch)

    def run(self, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend as planned; see :meth:`Attention.run`."""
        chosen = self._masked if self._is_tree or self.geometry.window(layer) else self._plain
        return chosen.run(layer, q, sm_scale, sink_logits)
