"""Long prefills that read no span: ordinary paged attention, which FlashInfer does faster than our kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvevict_kernels.transfer import to_device
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.flashinfer.attention import PagedWrapper, Planned, flashinfer_wrappers, plan_suffixes
from sgl_kvevict.attention.flashinfer.lists import build_suffix_lists
from sgl_kvevict.attention.refusals import flashinfer_reasons
from sgl_kvevict.attention.sink_logits import with_sink_logits
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.geometry import KVGeometry

NUM_WRAPPERS = 2
"""Planned in turn, so that a plan does not wait until the device has taken the one before; so many for each window."""


class PlainPrefill:
    """Attends for some requests of a batch, whose paths are empty.

    Like stock SGLang with FlashInfer: how FlashInfer schedules a batch may change the last bits of a row.

    Args:
        geometry: sizes.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim].
        v_arena: like ``k_arena``.
        make_wrapper: builds a wrapper; FlashInfer's picks fa3 on Hopper, else fa2.
    """

    def __init__(
        self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor, make_wrapper: Callable[[], PagedWrapper]
    ) -> None:
        self.geometry = geometry
        self.k_arena = k_arena
        self.v_arena = v_arena
        self._wrappers = {
            window: [Planned(make_wrapper(), k_arena.device) for _ in range(NUM_WRAPPERS)]
            for window in sorted({geometry.window(layer) for layer in range(geometry.num_layers)})
        }
        self._rows: slice | Tensor | None = None

    def plan(self, batch: AttentionBatch, requests: Sequence[int]) -> None:
        """Prepare the layers of one forward.

        Args:
            batch: the whole forward.
            requests: those to attend for, ascending; none: nothing is done until the next plan.
        """
        self._rows = None
        if not requests:
            return
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
        for window, wrappers in self._wrappers.items():
            wrappers.append(wrappers.pop(0))
            plan_suffixes(wrappers[-1], build_suffix_lists(part, window), self.geometry, self.k_arena.dtype, window)

    def run(
        self, layer: int, q: Tensor, sm_scale: float, out: Tensor, lse: Tensor, sink_logits: Tensor | None = None
    ) -> None:
        """Write the rows of the planned requests.

        Args:
            layer: layer index.
            q: [num_new_tokens, num_qo_heads, head_dim], of the whole forward.
            sm_scale: softmax scale.
            out: like ``q``.
            lse: [num_new_tokens, num_qo_heads], float32, natural.
            sink_logits: [num_qo_heads]; None: the layer has none.
        """
        if self._rows is None:
            return
        tokens = (self.k_arena[layer].unsqueeze(1), self.v_arena[layer].unsqueeze(1))
        options = {"return_lse": True, "k_scale": sm_scale, "enable_pdl": False}
        planned = self._wrappers[self.geometry.window(layer)][-1]
        got, base2 = planned.wrapper.run(q[self._rows].contiguous(), tokens, **options)
        out[self._rows], lse[self._rows] = with_sink_logits(got, base2 * math.log(2.0), sink_logits)

    def _rows_of(self, new_lens: Sequence[int], requests: Sequence[int]) -> slice | Tensor:
        """Rows of the requests' new tokens; neighbours are a slice, which costs no copy of the queries."""
        ends = torch.tensor(new_lens).cumsum(0).tolist()
        first, last = requests[0], requests[-1]
        if last - first + 1 == len(requests):
            return slice(ends[first] - new_lens[first], ends[last])
        rows = [row for i in requests for row in range(ends[i] - new_lens[i], ends[i])]
        return to_device(torch.tensor(rows), self.k_arena.device)


def find_plain_prefill(geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor) -> PlainPrefill | None:
    """Build one on a GPU where FlashInfer is installed and has kernels for the model; else ours take over."""
    reasons = flashinfer_reasons(k_arena.dtype, geometry.head_dim)
    if not k_arena.is_cuda or reasons:
        return None
    try:
        return PlainPrefill(geometry, k_arena, v_arena, flashinfer_wrappers(k_arena.device, backend="auto"))
    except UnsupportedSetupError:
        return None
