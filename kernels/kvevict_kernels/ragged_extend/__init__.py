"""Attention of many new tokens of a request over compressed spans and its own tokens."""

from __future__ import annotations

from torch import Tensor

from kvevict_kernels.dispatch import backend_for
from kvevict_kernels.ragged_decode.addresses import TableAddresses
from kvevict_kernels.ragged_decode.checks import check_run
from kvevict_kernels.ragged_decode.host_lists import uses_split
from kvevict_kernels.ragged_decode.reference import ragged_attention_over_paths_reference
from kvevict_kernels.ragged_decode.tables import LayerInputs, Step

__all__ = ["run_ragged_extend"]


def run_ragged_extend(addresses: TableAddresses, step: Step, inputs: LayerInputs, *, out: Tensor, lse: Tensor) -> None:
    """Attend with the new tokens of the requests that ``run_ragged_decode`` leaves out (more than 128 q rows a head).

    Arguments, results and errors as there. A new token sees its request's spans without a mask and its own tokens
    causally, in one softmax.

    Source: FlashAttention-2's loop, over gathered rows; parts of the keys as in Flash-Decoding.
    Cost: keys are read once per tile of 128 q rows (64 where shared memory is small) of a KV head; float32 sums; one
        launch, and a second one that merges the parts of requests whose tiles alone do not fill the device; no host
        sync, no atomics.
    """
    tables = addresses.tables
    if not tables.tile_request.numel():
        return
    check_run(tables, inputs, out, lse)
    if backend_for(inputs.q.device) == "cpu":
        want_out, want_lse = ragged_attention_over_paths_reference(tables, step, inputs)
        first = 0
        for new in tables.new_lens:
            if not uses_split(new, tables.sizes.group_size):
                rows = slice(first, first + new)
                out[rows], lse[rows] = want_out[rows], want_lse[rows]
            first += new
        return
    from kvevict_kernels.ragged_extend.triton_impl import run_extend

    run_extend(addresses, step, inputs, out, lse)
