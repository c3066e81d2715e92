"""The functions that attention calls: lay out a batch, start a step with its lengths, run a layer.

Attention has checked what it passes: nothing is checked here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kvevict_kernels.device_limits import limits_of
from kvevict_kernels.ragged_decode.addresses import TableAddresses
from kvevict_kernels.ragged_decode.host_lists import NUM_CLASSES, HostLists, Sizes
from kvevict_kernels.ragged_decode.tables import ITEM_WORDS, ClassTables, LayerInputs, Step, Tables
from kvevict_kernels.ragged_decode.tile_table import tiles_for
from kvevict_kernels.ragged_decode.triton_impl import advance, run_split
from kvevict_kernels.ragged_decode.triton_layout import lay_out
from kvevict_kernels.ragged_extend.triton_impl import run_extend
from kvevict_kernels.span_runs import SpanRuns
from kvevict_kernels.transfer import to_device


def sizes_on(
    device: torch.device,
    *,
    num_layers: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    has_windows: bool = False,
    has_few_bits: bool = False,
    is_fp8: bool = False,
) -> Sizes:
    """Sizes that all batches of a server share; ``device`` is where spans and arenas are.

    The last two, and errors, are those of :func:`kvevict_kernels.ragged_decode.tile_table.tiles_for`.
    """
    limits = limits_of(device)
    tiles = tiles_for(limits, head_dim, has_few_bits=has_few_bits, is_fp8=is_fp8)
    few, many, extend = (tile.rows for tile in tiles)
    return Sizes(num_layers, num_kv_heads, group_size, limits.num_sms, (few, many), extend, has_windows)


def plan_batch(
    paths: Sequence[Sequence[SpanRuns]],
    new_lens: Sequence[int],
    suffix_bounds: Sequence[int],
    *,
    sizes: Sizes,
    device: torch.device,
    elsewhere: Collection[int] = (),
) -> Tables:
    """Lay out a batch for all layers; valid until requests come or go, a path changes or a suffix exceeds its bound.

    Args:
        paths: per request, its spans, root first; () for none.
        new_lens: per request, new tokens, >= 1.
        suffix_bounds: per request, upper bound of the tokens after its path, new ones included; sizes the scratch.
        sizes: shared by all batches.
        device: where spans and arenas are.
        elsewhere: requests with more than 128 q rows per head for which another implementation attends.

    Cost: two small launches, one copy to the device, a few allocations; no host sync; 32 bytes per work item.
    """
    host = HostLists(paths, new_lens, suffix_bounds, sizes, elsewhere)
    sent = _send(host.addresses(), host.lists(), device)
    units = (sizes.num_layers, len(host.spans), sizes.num_kv_heads)
    tables = Tables(
        paths=tuple(tuple(path) for path in paths),
        new_lens=tuple(new_lens),
        sizes=sizes,
        run_address=torch.empty(units, dtype=torch.int64, device=device),
        run_lens=torch.empty(units, dtype=torch.int32, device=device),
        run_chunks=torch.empty(units, dtype=torch.int32, device=device),
        partial_start=torch.empty(units, dtype=torch.int64, device=device),
        has_splits=any(splits > 1 for splits in host.num_splits),
        classes=tuple(_class_tables(host, which, sent.pop(f"requests_{which}")) for which in range(NUM_CLASSES)),
        num_partials=host.num_partials,
        tile_counts=host.tile_counts(),
        **sent,
    )
    lay_out(tables)
    return tables


def _class_tables(host: HostLists, which: int, requests: Tensor) -> ClassTables:
    num_layers, device = host.sizes.num_layers, requests.device
    max_items = host.max_items(which)
    num_units = len(host.spans) * host.sizes.num_kv_heads
    return ClassTables(
        max_items=max_items,
        items=torch.empty(num_layers, max_items, ITEM_WORDS, dtype=torch.int64, device=device),
        item_start=torch.empty(num_layers, num_units, dtype=torch.int32, device=device),
        item_count=torch.empty(num_layers, dtype=torch.int32, device=device),
        requests=requests,
        max_suffix_items=host.max_suffix_items(which),
    )


def _send(wide: dict[str, list[int]], narrow: dict[str, list[int]], device: torch.device) -> dict[str, Tensor]:
    """Copy lists to the device in one piece: 64-bit ones, then 32-bit ones."""
    words = torch.tensor([x for values in wide.values() for x in values], dtype=torch.int64)
    halves = torch.tensor([x for values in narrow.values() for x in values], dtype=torch.int32)
    # 64-bit numbers first, so that they are aligned. One copy: each costs as much as a launch.
    flat = to_device(torch.cat([words.view(torch.int32), halves]), device)
    first = 2 * words.numel()
    pieces = torch.split(flat[:first].view(torch.int64), [len(values) for values in wide.values()])
    small = torch.split(flat[first:], [len(values) for values in narrow.values()])
    return dict(zip([*wide, *narrow], [*pieces, *small], strict=True))


def start_step(
    addresses: TableAddresses,
    *,
    req_to_token: Tensor,
    pool_rows: Tensor,
    seq_lens: Tensor,
    visible: Tensor | None = None,
) -> Step:
    """Store the lengths of one forward for all its layers.

    Args:
        addresses: of the batch's tables.
        req_to_token: [num_rows, max_context_len], int32, token slots.
        pool_rows: [num_requests], int64, each request's row of it.
        seq_lens: [num_requests], int32, logical tokens including new ones: at least compressed_len + new tokens.
        visible: [num_new], int64: bit j is set if the token sees its request's j-th new token (at most 64 each); None:
            it sees those before it.
    """
    tables = addresses.tables
    device = tables.compressed_lens.device
    items = tuple(
        torch.empty(max(1, work.max_suffix_items), ITEM_WORDS, dtype=torch.int64, device=device)
        for work in tables.classes
    )
    item_start = tuple(
        torch.empty(work.requests.numel() + 1, dtype=torch.int32, device=device) for work in tables.classes
    )
    step = Step(req_to_token, pool_rows, seq_lens, items, item_start, visible)
    advance(addresses, step)
    return step


def run_layer(addresses: TableAddresses, step: Step, inputs: LayerInputs, *, out: Tensor, lse: Tensor) -> None:
    """Attend with the new tokens of all requests, except the batch's ``elsewhere``.

    A new token sees the spans of its request's path and the request's own tokens up to itself, in one softmax; in a
    layer with a window only keys less than ``inputs.window`` positions before it. Requests with up to 128 q rows per KV
    head use ``ragged_decode``, which reads a shared span once; the others use ``ragged_extend``, one by one. Their rows
    of ``out`` (like ``inputs.q``, as wide as values) and ``lse`` are written; ``lse`` is [num_new_tokens,
    num_qo_heads], float32, the natural log-sum-exp of the scaled scores.

    Source: split-KV decoding (Flash-Decoding) over runs per head, as FlashInfer's variable block sparse attention;
        FlashAttention-2's loop over gathered rows.
    Cost: keys are read once per tile of q rows of a unit (64 or 128; fewer where rows are wide);
        float32 sums; one launch per class and a merge, one launch for prefills and one that merges the parts of their
        keys, if they are split; no host sync, no atomics.
    """
    tables = addresses.tables
    if tables.merge_request.numel():
        run_split(addresses, step, inputs, out, lse)
    if tables.tile_request.numel():
        run_extend(addresses, step, inputs, out, lse)
