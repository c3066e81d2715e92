"""Choose and build an implementation of attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvevict_kernels.row_codec import RowCoding
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.cpu.torch_attention import TorchAttention
from sgl_kvevict.attention.interface import Attention
from sgl_kvevict.attention.kernel_facts import kernels_for
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.support import IMPLEMENTATION, require

logger = logging.getLogger(__name__)


def build_attention(
    name: str,
    geometry: KVGeometry,
    k_arena: Tensor,
    v_arena: Tensor,
    q_dtype: torch.dtype | None = None,
    on_all_ranks: Callable[[bool], bool] = bool,
    *,
    verifies: bool = False,
    coding: RowCoding | None = None,
    sink_dtype: torch.dtype | None = None,
) -> Attention:
    """Build the configured implementation on the arenas' device.

    Args:
        name: ``auto``, ``numba``, ``torch``, ``triton`` or ``flashinfer``.
        geometry: sizes.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], contiguous.
        v_arena: like ``k_arena``, or the first ``geometry.latent_dim`` columns of its rows.
        q_dtype: of the queries, where the arena holds float8.
        on_all_ranks: whether a condition holds on all tensor-parallel ranks; default: there is one rank.
        verifies: some batches are trees of draft tokens (:attr:`AttentionBatch.visible`).
        coding: of the arenas' rows of 4 bits; None: no span has such rows.
        sink_dtype: of the layers' sink logits, with which kernels are warmed up, too; None: there are none.

    Raises:
        UnsupportedSetupError: it does not run on this device, or its package is missing; or 'flashinfer' is configured,
            and the model keeps latents or its kernels cannot be compiled.
    """
    facts = kernels_for(name, k_arena.device, head_dim=geometry.head_dim)
    require(IMPLEMENTATION, facts)
    chosen = facts.chosen
    if chosen == "torch" and name == "auto":
        logger.warning("attention is 'torch', which takes longer: %s", facts.numba_error)
    if chosen == "numba":
        from sgl_kvevict.attention.cpu.numba_attention import NumbaAttention

        return NumbaAttention(geometry, k_arena, v_arena, coding)
    if chosen == "torch":
        return TorchAttention(geometry, k_arena, v_arena, coding)
    plain: Attention | None = None
    # FlashInfer would have no layer to attend in where all have windows.
    if chosen == "flashinfer" and geometry.full_layers:
        from sgl_kvevict.attention.flashinfer.attention import FlashInferAttention

        of_spans = FlashInferAttention(replace(geometry, windows=()), k_arena, v_arena)
        # FlashInfer compiles at the first plan: now, not while a request waits.
        of_spans.warm_up()
        if not (geometry.has_windows or verifies):
            return of_spans
        plain = of_spans
    from sgl_kvevict.attention.flashinfer.prefill import find_plain_prefill
    from sgl_kvevict.attention.triton.attention import TritonAttention

    on_gpu = k_arena.is_cuda
    plain_prefill = find_plain_prefill(geometry, k_arena, v_arena, on_all_ranks) if on_gpu else None
    masked = TritonAttention(geometry, k_arena, v_arena, q_dtype, plain_prefill, verifies=verifies, coding=coding)
    if on_gpu:
        masked.warm_up(sink_dtype)
    # Layers with a window, and trees, are for our own attention.
    return masked if plain is None else ByWindow(plain, masked)


class ByWindow:
    """Attention where ``plain`` reads whole spans and knows only causal masks, and ``masked`` does the rest.

    In a layer with a window the first visible entry of a span differs per query and step, and a tree of new tokens
    hides keys in the middle. FlashInfer would need a mask per layer and step; our Triton kernels read positions and
    bits.

    The geometry of ``plain`` has no windows, that of ``masked`` has all layers; they share the arena.
    """

    def __init__(self, plain: Attention, masked: Attention) -> None:
        self.geometry = masked.geometry
        self._plain = plain
        self._masked = masked
        self._is_tree = False

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare the layers of one forward."""
        self._is_tree = batch.visible is not None
        # FlashInfer's plan copies lists to the device, which a forward of trees would pay for nothing.
        if not self._is_tree:
            self._plain.plan(batch)
        if self._is_tree or self.geometry.has_windows:
            self._masked.plan(batch)

    def run(self, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend as planned."""
        chosen = self._masked if self._is_tree or self.geometry.window(layer) else self._plain
        return chosen.run(layer, q, sm_scale, sink_logits)
