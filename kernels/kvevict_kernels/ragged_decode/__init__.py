"""Attention of few new tokens per request over compressed spans and uncompressed suffixes, in the same launch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kvevict_kernels.checks import check_int, check_positions, check_tensor
from kvevict_kernels.device_limits import limits_of
from kvevict_kernels.dispatch import backend_for
from kvevict_kernels.ragged_decode.addresses import TableAddresses
from kvevict_kernels.ragged_decode.checks import check_run
from kvevict_kernels.ragged_decode.host_lists import Sizes
from kvevict_kernels.ragged_decode.reference import ragged_attention_over_paths_reference
from kvevict_kernels.ragged_decode.tables import LayerInputs, Step, Tables, build_step, build_tables
from kvevict_kernels.ragged_decode.tile_table import EXTEND, tiles_for
from kvevict_kernels.span_runs import SpanRuns

__all__ = [
    "list_addresses",
    "plan_ragged_decode",
    "ragged_attention_over_paths_reference",
    "run_ragged_decode",
    "sizes_on",
    "start_step",
]


def plan_ragged_decode(
    paths: Sequence[Sequence[SpanRuns]],
    new_lens: Sequence[int],
    suffix_bounds: Sequence[int],
    *,
    sizes: Sizes,
    device: torch.device,
    elsewhere: Collection[int] = (),
) -> Tables:
    """Lay out what a batch reads, for all layers; valid until requests come or go, a path changes or a bound is passed.

    Args:
        paths: per request, the spans that it reads, root first; () for none.
        new_lens: per request, new tokens, >= 1.
        suffix_bounds: per request, tokens behind its path with the new ones, at most: bounds the scratch.
        sizes: what stays the same for all batches.
        device: where spans and arenas are.
        elsewhere: requests with more than 128 q rows a head that another implementation attends for.

    Raises:
        ValueError: different numbers of requests, no new token, a bound below the new tokens, a span of another
            shape, dtype or device.

    Cost: two small launches, one copy to the device, a few allocations; no host sync; a few bytes per 128 entries.
    """
    if not len(paths) == len(new_lens) == len(suffix_bounds):
        raise ValueError(
            f"new_lens, suffix_bounds: expected one for each of {len(paths)} paths, "
            f"got {len(new_lens)} and {len(suffix_bounds)}"
        )
    for new, bound in zip(new_lens, suffix_bounds, strict=True):
        check_int("new_lens", new, 1)
        check_int("suffix_bounds", bound, new)
    shape = (sizes.num_layers, sizes.num_kv_heads)
    for span in {id(span): span for path in paths for span in path}.values():
        check_tensor("head_slots", span.head_slots, (None,), torch.int32, device)
        check_tensor("starts", span.starts, shape, torch.int32, device)
        check_tensor("lens", span.lens, shape, torch.int32, device)
        if sizes.has_windows:
            check_positions(span.positions, span.head_slots)
    tables = build_tables(paths, new_lens, suffix_bounds, sizes=sizes, device=device, elsewhere=elsewhere)
    if backend_for(device) == "triton":
        from kvevict_kernels.ragged_decode.triton_layout import lay_out

        lay_out(tables)
    return tables


def sizes_on(
    device: torch.device,
    *,
    num_layers: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    has_windows: bool = False,
) -> Sizes:
    """Put together what stays the same for all batches of a server.

    Args:
        device: where spans and arenas are.
        num_layers: layers.
        num_kv_heads: KV heads.
        group_size: q heads per KV head.
        head_dim: width of a row.
        has_windows: queries of some layers see their last tokens only.

    Raises:
        ValueError: a size below 1, or a head_dim that no kernel is compiled for.
    """
    sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "group_size": group_size, "head_dim": head_dim}
    for name, value in sizes.items():
        check_int(name, value, 1)
    limits = limits_of(device)
    tiles = tiles_for(limits, head_dim)
    return Sizes(num_layers, num_kv_heads, group_size, limits.num_sms, tiles[EXTEND].rows, has_windows)


def list_addresses(tables: Tables, partials: tuple[Tensor, Tensor]) -> TableAddresses:
    """List where the tables and the scratch of a batch are; see :class:`TableAddresses` for what a captured step needs.

    Args:
        tables: from :func:`plan_ragged_decode`.
        partials: scratch, [>= tables.num_partials, head_dim] and [>= tables.num_partials], float32; layers and
            forwards that run one after the other may share it.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    device = tables.waterlines.device
    check_tensor("partials", partials[0], (None, None), torch.float32, device)
    check_tensor("partials", partials[1], (partials[0].shape[0],), torch.float32, device)
    if partials[0].shape[0] < tables.num_partials:
        raise ValueError(f"partials: expected at least {tables.num_partials} rows, got {partials[0].shape[0]}")
    return TableAddresses.of(tables, partials)


def start_step(
    addresses: TableAddresses,
    *,
    req_to_token: Tensor,
    pool_rows: Tensor,
    seq_lens: Tensor,
    previous: Step | None = None,
) -> Step:
    """Take the lengths of one forward; every layer of it uses the result.

    Args:
        addresses: from :func:`list_addresses`.
        req_to_token: [num_rows, max_context_len], int32, token slots.
        pool_rows: [num_requests], int64, each request's row of it.
        seq_lens: [num_requests], int32, logical tokens with the new ones: at least waterline + new tokens.
        previous: the step before with the same tables: its buffers are used again.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    tables = addresses.tables
    num_requests = len(tables.new_lens)
    device = tables.waterlines.device
    check_tensor("req_to_token", req_to_token, (None, None), torch.int32, device)
    check_tensor("pool_rows", pool_rows, (num_requests,), torch.int64, device)
    check_tensor("seq_lens", seq_lens, (num_requests,), torch.int32, device)
    step = build_step(tables, req_to_token, pool_rows, seq_lens, previous)
    if backend_for(device) == "triton":
        from kvevict_kernels.ragged_decode.triton_impl import advance

        advance(addresses, step)
    return step


def run_ragged_decode(addresses: TableAddresses, step: Step, inputs: LayerInputs, *, out: Tensor, lse: Tensor) -> None:
    """Attend with the new tokens of all requests but those that ``ragged_extend`` takes (more than 128 q rows a head).

    A new token sees the spans of its request's path, all of them, and the request's own tokens up to itself, in
    one softmax; in a layer with a window only what is less than ``inputs.window`` positions before it. A span that
    several requests read is read once for all of them.

    Args:
        addresses: from :func:`list_addresses`.
        step: from :func:`start_step`.
        inputs: the layer's queries, and where K and V are.
        out: like ``inputs.q``; rows of the requests that it attends for are written.
        lse: [num_new_tokens, num_qo_heads], float32, natural log-sum-exp of the scaled scores; likewise.

    Raises:
        ValueError: wrong shape, dtype or device of ``q``, ``out`` or ``lse``.

    Source: split-KV decoding (Flash-Decoding) over runs per head, as FlashInfer's variable block sparse attention.
    Cost: every KV row is read once per 64 q rows of its unit; float32 sums; one launch per class and a merge; no host
        sync, no atomics.
    """
    tables = addresses.tables
    if not tables.merge_request.numel():
        return
    check_run(tables, inputs, out, lse)
    if addresses.partials[0].shape[1] != inputs.q.shape[2]:
        raise ValueError(f"partials: expected {inputs.q.shape[2]} columns, got {addresses.partials[0].shape[1]}")
    if backend_for(inputs.q.device) == "cpu":
        _run_reference(tables, step, inputs, out, lse)
        return
    from kvevict_kernels.ragged_decode.triton_impl import run_split

    run_split(addresses, step, inputs, out, lse)


def _run_reference(tables: Tables, step: Step, inputs: LayerInputs, out: Tensor, lse: Tensor) -> None:
    """What CPU tensors get: nobody serves with this, TorchAttention is for that."""
    want_out, want_lse = ragged_attention_over_paths_reference(tables, step, inputs)
    first = tables.request_members[tables.merge_request.long()] + tables.merge_token
    rows = tables.members[first.long()].long()
    out[rows], lse[rows] = want_out[rows], want_lse[rows]
