"""Every kernel against its float32 reference, on the device; the errors that count are relative to torch's bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu_bench.setting import Setting
from kvevict_kernels.accumulated_attention import accumulated_attention, accumulated_attention_reference
from kvevict_kernels.alloc_head_slots import alloc_head_slots, alloc_head_slots_reference
from kvevict_kernels.compact_kv import compact_kv, compact_kv_reference
from kvevict_kernels.radix_select import top_mask, top_mask_reference
from kvevict_kernels.ragged_decode import (
    list_addresses,
    plan_ragged_decode,
    ragged_attention_over_paths_reference,
    run_ragged_decode,
    sizes_on,
    start_step,
)
from kvevict_kernels.ragged_decode.tables import LayerInputs
from kvevict_kernels.ragged_extend import run_ragged_extend
from kvevict_kernels.span_runs import SpanRuns
from kvevict_kernels.window_scores import window_scores, window_scores_reference

LIMITS = {"exact": 0.0, "float32": 2e-5, "bfloat16": 1.6e-2}
"""Largest error allowed, relative to the largest result: one unit in the last place of bfloat16 is 0.8 %."""


def correctness(setting: Setting) -> list[dict[str, Any]]:
    """One row per kernel."""
    torch.manual_seed(42)
    rows = [
        _row("alloc_head_slots", "exact", *_alloc(setting)),
        _row("compact_kv, overlapping moves", "exact", *_compact(setting)),
        _row("compact_kv, weighted sums", "bfloat16", *_compact(setting, is_weighted=True)),
        _row("radix_select", "exact", *_select(setting)),
        _row("window_scores", "float32", *_window(setting)),
        _row("accumulated_attention, sum", "float32", *_accumulated(setting, "sum")),
        _row("accumulated_attention, max", "float32", *_accumulated(setting, "max")),
    ]
    for name, new_lens in (("ragged_decode, decode", [1, 1, 1]), ("ragged_decode and ragged_extend", [1, 9, 40])):
        (out, lse), (want_out, want_lse) = _paths(setting, new_lens)
        rows.append(_row(name, "bfloat16", out, want_out))
        rows.append(_row(name + ", log-sum-exp", "float32", lse, want_lse))
    return rows


def _row(name: str, kind: str, got: Tensor, want: Tensor) -> dict[str, Any]:
    error = float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30))
    return {"kernel": name, "relative error": error, "allowed": LIMITS[kind], "right": error <= LIMITS[kind]}


def _normal(setting: Setting, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(setting.device, dtype)


def _alloc(setting: Setting) -> tuple[Tensor, Tensor]:
    lens = torch.randint(0, 40, (4, 8), dtype=torch.int32)
    slots = torch.randperm(500)[: -(-int(lens.sum()) // 32)]
    args = (lens.to(setting.device), slots.to(setting.device), 500, int(lens.sum()))
    return torch.cat(alloc_head_slots(*args)), torch.cat(alloc_head_slots_reference(lens, slots, *args[2:])).to(
        setting.device
    )


def _compact(setting: Setting, *, is_weighted: bool = False) -> tuple[Tensor, Tensor]:
    k, v = (_normal(setting, 2, 60, 4, setting.head_dim) for _ in range(2))
    rows = torch.randperm(480)
    src, dst = rows[:300].int().to(setting.device), rows.flip(0)[:100].int().to(setting.device)
    options: dict[str, Tensor] = {}
    if is_weighted:
        options["indptr"] = (torch.arange(101, dtype=torch.int32) * 3).to(setting.device)
        options["weights"] = torch.rand(300).to(setting.device)
    else:
        src = src[:100]
    want = (k.clone(), v.clone())
    compact_kv(k, v, src, dst, **options)
    compact_kv_reference(*want, src, dst, **options)
    return torch.cat([k, v]).float(), torch.cat(want).float()


def _select(setting: Setting) -> tuple[Tensor, Tensor]:
    """Masks of a few rows and of one long row, with many ties (32 bits) and with hardly any (64 bits)."""
    got, want = [], []
    for num_rows, n in ((3, setting.prefix_tokens), (1, 20 * setting.prefix_tokens)):
        counts = torch.arange(1, num_rows + 1) * n // 4
        for dtype, highest in ((torch.int32, 3), (torch.int64, 2**62)):
            keys = torch.randint(-highest, highest, (num_rows, n), dtype=dtype)
            got.append(top_mask(keys.to(setting.device), counts.to(setting.device)).flatten())
            want.append(top_mask_reference(keys, counts).flatten().to(setting.device))
    return torch.cat(got), torch.cat(want)


def _window(setting: Setting) -> tuple[Tensor, Tensor]:
    heads, group, dim = setting.num_kv_heads, setting.group_size, setting.head_dim
    queries, keys = _normal(setting, 8, heads * group, dim), _normal(setting, 300, heads, dim)
    slots = torch.randperm(300)[:200].to(setting.device)
    lse = torch.full((8, heads * group), 6.0, device=setting.device)
    options: dict[str, Any] = {"sm_scale": setting.sm_scale, "key_start": 0, "query_start": 196, "kernel_size": 7}
    got = window_scores(queries, lse, keys, slots, **options)
    want = window_scores_reference(queries.float(), lse, keys.float(), slots, **options)
    return torch.cat(got), torch.cat(want)


def _accumulated(setting: Setting, reduction: Any) -> tuple[Tensor, Tensor]:
    heads, group, dim = setting.num_kv_heads, setting.group_size, setting.head_dim
    queries, keys = _normal(setting, 50, heads * group, dim), _normal(setting, 300, heads, dim)
    slots = torch.randperm(300)[:150].to(setting.device)
    lse = torch.full((50, heads * group), 6.0, device=setting.device)
    options: dict[str, Any] = {"sm_scale": setting.sm_scale, "key_start": 0, "query_start": 100, "reduction": reduction}
    got = accumulated_attention(queries, lse, keys, slots, **options)
    return got, accumulated_attention_reference(queries.float(), lse, keys.float(), slots, **options)


def _paths(setting: Setting, new_lens: list[int]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Three requests, the last two on one span, one of them on another span too."""
    layers, heads, slots = 2, setting.num_kv_heads, 400
    shared, own = (_span(setting, layers, heads, slots, longest) for longest in (90, 50))
    k, v = (_normal(setting, layers, slots, heads, setting.head_dim) for _ in range(2))
    device = k.device
    group, dim = setting.group_size, setting.head_dim
    sizes = sizes_on(device, num_layers=layers, num_kv_heads=heads, group_size=group, head_dim=dim)
    paths: list[tuple[SpanRuns, ...]] = [(), (shared,), (shared, own)]
    table = plan_ragged_decode(paths, new_lens, [100, 100, 100], sizes=sizes, device=device)
    seq_lens = torch.tensor([60, 100 + 30, 100 + 60 + 70], dtype=torch.int32, device=device)
    rows = torch.arange(3, device=device)
    req_to_token = torch.stack([torch.randperm(slots) for _ in range(3)]).int().to(device)
    partials = tuple(
        torch.empty(shape, device=device) for shape in ((table.num_partials, setting.head_dim), (table.num_partials,))
    )
    addresses = list_addresses(table, partials)
    step = start_step(addresses, req_to_token=req_to_token, pool_rows=rows, seq_lens=seq_lens)
    q = _normal(setting, sum(new_lens), heads * setting.group_size, setting.head_dim)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    inputs = LayerInputs(1, q, k, v, setting.sm_scale)
    run_ragged_decode(addresses, step, inputs, out=out, lse=lse)
    run_ragged_extend(addresses, step, inputs, out=out, lse=lse)
    exact = LayerInputs(1, q.float(), k.float(), v.float(), setting.sm_scale)
    return (out, lse), ragged_attention_over_paths_reference(table, step, exact)


def _span(setting: Setting, layers: int, heads: int, slots: int, longest: int) -> SpanRuns:
    lens = torch.randint(0, longest + 1, (layers, heads), dtype=torch.int32)
    starts = (lens.flatten().cumsum(0) - lens.flatten()).view(lens.shape).int()
    head_slots = torch.randperm(layers * slots * heads)[: int(lens.sum())].int()
    num_tokens = longest + 10
    return SpanRuns(*(x.to(setting.device) for x in (head_slots, starts, lens)), num_tokens)
