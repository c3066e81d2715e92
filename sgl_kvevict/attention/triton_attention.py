"""Attention by our own Triton kernels: spans and suffixes in the same launches, lengths read on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.checks import KV_DTYPES, check_tensor
from kvevict_kernels.ragged_decode import plan_ragged_decode, run_ragged_decode, start_step
from kvevict_kernels.ragged_decode.tables import LayerInputs, Step, Tables
from kvevict_kernels.ragged_extend import run_ragged_extend
from sgl_kvevict.attention.batch import AttentionBatch, CompositionKey
from sgl_kvevict.attention.recent_compositions import RecentCompositions
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry


@dataclass
class _Composition:
    """Tables of a batch and the buffers of its steps."""

    tables: Tables
    step: Step | None = None


class TritonAttention:
    """Attention of new tokens over compressed spans and uncompressed token slots.

    What concerns spans is laid out on the device when requests come or go or their paths change; a step copies no
    lists, reads nothing back and launches one kernel that counts the suffixes' work.

    Args:
        geometry: sizes.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], contiguous.
        v_arena: like ``k_arena``.

    Raises:
        ValueError: wrong shape, dtype or device of an arena.
    """

    def __init__(self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor) -> None:
        shape = (geometry.num_layers, geometry.num_token_slots, geometry.num_kv_heads, geometry.head_dim)
        check_tensor("k_arena", k_arena, shape, KV_DTYPES)
        check_tensor("v_arena", v_arena, shape, k_arena.dtype, k_arena.device)
        self.geometry = geometry
        self.k_arena = k_arena
        self.v_arena = v_arena
        self.num_compositions_built = 0
        self._compositions: RecentCompositions[CompositionKey, _Composition] = RecentCompositions()
        self._composition: _Composition | None = None
        self._partials: tuple[Tensor, Tensor] | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare the layers of one forward.

        Args:
            batch: the requests of the forward; with ``device_seq_lens`` nothing is copied from the host while
                the composition stays the same.
        """
        device = self.k_arena.device
        composition = self._compositions.get(batch.composition, lambda: self._build(batch))
        seq_lens = batch.device_seq_lens
        if seq_lens is None:
            host_lens = torch.tensor(batch.seq_lens, dtype=torch.int32)
            seq_lens = (host_lens.pin_memory() if device.type == "cuda" else host_lens).to(device, non_blocking=True)
        composition.step = start_step(
            composition.tables,
            req_to_token=batch.req_to_token,
            pool_rows=batch.req_pool_indices.long(),
            seq_lens=seq_lens.int(),
            previous=composition.step,
        )
        self._composition = composition
        self._reserve_partials(composition.tables.num_partials)

    def run(self, layer: int, q: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
        """Attend as planned; see :meth:`sgl_kvevict.attention.backend.Attention.run`."""
        composition = self._composition
        num_new = 0 if composition is None else composition.tables.num_new
        shape = (num_new, self.geometry.num_qo_heads, self.geometry.head_dim)
        if composition is None or composition.step is None or self._partials is None or tuple(q.shape) != shape:
            raise InvariantError(f"q: planned {list(shape)}, got {list(q.shape)}")
        queries = q.contiguous().to(self.k_arena.dtype)
        out = torch.empty_like(queries)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        inputs = LayerInputs(layer, queries, self.k_arena, self.v_arena, sm_scale)
        run_ragged_decode(composition.tables, composition.step, inputs, partials=self._partials, out=out, lse=lse)
        run_ragged_extend(composition.tables, composition.step, inputs, out=out, lse=lse)
        return out.to(q.dtype), lse

    def _build(self, batch: AttentionBatch) -> _Composition:
        self.num_compositions_built += 1
        geometry = self.geometry
        tables = plan_ragged_decode(
            batch.paths,
            batch.new_lens,
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            group_size=geometry.group_size,
            device=self.k_arena.device,
        )
        return _Composition(tables)

    def _reserve_partials(self, num_rows: int) -> None:
        """Grow the scratch; all layers and forwards use it one after the other, on one stream."""
        if self._partials is None or self._partials[0].shape[0] < num_rows:
            device = self.k_arena.device
            self._partials = (
                torch.empty(num_rows, self.geometry.head_dim, dtype=torch.float32, device=device),
                torch.empty(num_rows, dtype=torch.float32, device=device),
            )
