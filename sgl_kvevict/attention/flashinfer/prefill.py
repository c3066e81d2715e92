"""Long prefills that read no span: ordinary paged attention, by FlashInfer where it is installed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvevict_kernels.transfer import to_device
from sgl_kvevict import support
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.flashinfer.wrapper import WORKSPACE_BYTES, PagedPrefill, compiles_kernels
from sgl_kvevict.attention.interface import with_sink_logits
from sgl_kvevict.attention.kernel_facts import kernels_for
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.geometry import KVGeometry

NUM_PREFILLS = 2
"""Used in turn per window, so that a plan does not wait until the device has copied the previous one."""

KERNELS_VAR = "KVEVICT_FLASHINFER_PREFILL"
KERNELS = ("auto", "fa2", "fa3")
"""Values of that variable: fa3 on Hopper and else fa2; or one of them, where compiling fa3 takes too long."""

logger = logging.getLogger(__name__)


class PlainPrefill:
    """Attends for those requests of a batch whose paths are empty.

    As in stock SGLang, FlashInfer's schedule of a batch may change the last bits of a row. ``kernels`` is one of
    :data:`KERNELS`.
    """

    def __init__(self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor, kernels: str = "auto") -> None:
        self.geometry = geometry
        self.k_arena = k_arena
        self.v_arena = v_arena
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=k_arena.device)
        self._prefills = {
            window: [PagedPrefill(workspace, geometry.head_dim, k_arena.dtype, kernels) for _ in range(NUM_PREFILLS)]
            for window in sorted({geometry.window(layer) for layer in range(geometry.num_layers)})
        }
        self._rows: slice | Tensor = slice(0)  # rows of the planned requests

    def warm_up(self) -> None:
        """Compile and run the kernel of each kind of window once, on token slot 0; see :func:`compiles_kernels`."""
        device, geometry = self.k_arena.device, self.geometry
        row = torch.zeros(1, dtype=torch.int64, device=device)
        slots = torch.zeros(1, 2, dtype=torch.int32, device=device)
        shape = (2, geometry.num_qo_heads, geometry.head_dim)
        q = torch.zeros(shape, dtype=self.k_arena.dtype, device=device)
        lse = torch.empty(shape[:2], dtype=torch.float32, device=device)
        with compiles_kernels():
            self.plan(AttentionBatch(((),), [2], [2], row, slots), [0])
            for layer in {geometry.window(layer): layer for layer in range(geometry.num_layers)}.values():
                self.run(layer, q, 1.0, torch.empty_like(q), lse)

    def plan(self, batch: AttentionBatch, requests: Sequence[int]) -> None:
        """Prepare the layers of one forward for ``requests`` of the batch (ascending, at least one)."""
        self._rows = self._rows_of(batch.new_lens, requests)
        chosen = to_device(torch.tensor(requests), batch.req_pool_indices.device)
        part = replace(
            batch,
            paths=((),) * len(requests),
            seq_lens=[batch.seq_lens[i] for i in requests],
            extend_lens=[batch.new_lens[i] for i in requests],
            req_pool_indices=batch.req_pool_indices.index_select(0, chosen),
            device_seq_lens=None,
        )
        for window, prefills in self._prefills.items():
            prefills.append(prefills.pop(0))
            prefills[-1].plan_suffixes(part, self.geometry, window)

    def run(
        self, layer: int, q: Tensor, sm_scale: float, out: Tensor, lse: Tensor, sink_logits: Tensor | None = None
    ) -> None:
        """Write the rows of the planned requests; neighbouring requests are written in place.

        ``q`` and ``out`` are [num_new_tokens, num_qo_heads, head_dim] of the whole forward; ``lse`` is [num_new_tokens,
        num_qo_heads], float32, natural. ``out`` and ``lse`` are contiguous.
        """
        rows = self._rows
        queries = q[rows].contiguous()
        in_place = isinstance(rows, slice)
        got = out[rows] if in_place else torch.empty_like(queries)
        got_lse = lse[rows] if in_place else torch.empty(queries.shape[:2], dtype=torch.float32, device=q.device)
        k, v = self.k_arena[layer].unsqueeze(1), self.v_arena[layer].unsqueeze(1)
        self._prefills[self.geometry.window(layer)][-1].run(queries, k, v, sm_scale, got, got_lse)
        # This kernel of FlashInfer has no sinks, so they join the finished softmax.
        if sink_logits is not None or not in_place:
            out[rows], lse[rows] = with_sink_logits(got, got_lse, sink_logits)

    def _rows_of(self, new_lens: Sequence[int], requests: Sequence[int]) -> slice | Tensor:
        """Rows of the requests' new tokens; a slice if the requests are neighbours."""
        ends = torch.tensor(new_lens).cumsum(0).tolist()
        first, last = requests[0], requests[-1]
        if last - first + 1 == len(requests):
            return slice(ends[first] - new_lens[first], ends[last])
        rows = [row for i in requests for row in range(ends[i] - new_lens[i], ends[i])]
        return to_device(torch.tensor(rows), self.k_arena.device)


def find_plain_prefill(
    geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor, on_all_ranks: Callable[[bool], bool]
) -> PlainPrefill | None:
    """Build and try one; None where FlashInfer is missing, cannot compile, or has no kernels for the model.

    ``on_all_ranks`` tells whether a condition holds on all tensor-parallel ranks; all ranks call it.
    UnsupportedSetupError: :data:`KERNELS_VAR` has another value than those allowed.
    """
    kernels = os.environ.get(KERNELS_VAR, "auto")
    if kernels not in KERNELS:
        raise UnsupportedSetupError([f"{KERNELS_VAR} is {kernels!r} (allowed: {', '.join(map(repr, KERNELS))})"])
    pool = k_arena.device, k_arena.dtype, geometry.head_dim
    if support.reasons(support.KERNELS, kernels_for("flashinfer", *pool, is_latent=geometry.is_latent)):
        return None
    found: PlainPrefill | None = None
    try:
        with compiles_kernels():
            found = PlainPrefill(geometry, k_arena, v_arena, kernels)
        found.warm_up()
    except UnsupportedSetupError as error:
        logger.warning("long prefills without spans are computed by our own kernel: %s", error.reasons[0])
        # What was allocated for it, with its workspace of 256 MiB, is released.
        found = None
    return found if on_all_ranks(found is not None) else None
