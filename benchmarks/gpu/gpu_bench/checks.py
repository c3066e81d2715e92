"""Every kernel beside its CPU path in float32; errors of attention are relative to bfloat16's rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu_bench.setting import Setting
from kvevict_kernels.alloc_head_slots import alloc_head_slots, alloc_head_slots_cpu
from kvevict_kernels.compact_kv import compact_kv, compact_kv_cpu
from kvevict_kernels.key_scores import accumulated_attention, key_scores_cpu, window_scores
from kvevict_kernels.radix_select import top_mask, top_mask_cpu
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.cpu.torch_attention import TorchAttention
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.geometry import KVGeometry

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
    return torch.cat(alloc_head_slots(*args)).cpu(), torch.cat(alloc_head_slots_cpu(lens, slots, *args[2:], 1))


def _compact(setting: Setting, *, is_weighted: bool = False) -> tuple[Tensor, Tensor]:
    k, v = (_normal(setting, 2, 60, 4, setting.head_dim) for _ in range(2))
    rows = torch.randperm(480)
    src, dst = rows[:300].int().to(setting.device), rows.flip(0)[:100].int().to(setting.device)
    indptr = weights = None
    if is_weighted:
        indptr = (torch.arange(101, dtype=torch.int32) * 3).to(setting.device)
        weights = torch.rand(300).to(setting.device)
    else:
        src = src[:100]
    want = [x.cpu().clone() for x in (k, v)]
    compact_kv(k, v, src, dst, indptr=indptr, weights=weights)
    starts, factors = (None if x is None else x.cpu() for x in (indptr, weights))
    compact_kv_cpu(want[0], want[1], src.cpu(), dst.cpu(), starts, factors)
    return torch.cat([k, v]).float().cpu(), torch.cat(want).float()


def _select(setting: Setting) -> tuple[Tensor, Tensor]:
    """Masks of a few rows and of one long row, with many ties (32 bits) and with hardly any (64 bits)."""
    got, want = [], []
    for num_rows, n in ((3, setting.prefix_tokens), (1, 20 * setting.prefix_tokens)):
        counts = torch.arange(1, num_rows + 1) * n // 4
        for dtype, highest in ((torch.int32, 3), (torch.int64, 2**62)):
            keys = torch.randint(-highest, highest, (num_rows, n), dtype=dtype)
            got.append(top_mask(keys.to(setting.device), counts.to(setting.device)).flatten().cpu())
            want.append(top_mask_cpu(keys, counts).flatten())
    return torch.cat(got), torch.cat(want)


def _scored(setting: Setting, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, their log-sum-exps, keys and the slots of half of them or more."""
    heads, group, dim = setting.num_kv_heads, setting.group_size, setting.head_dim
    queries, keys = _normal(setting, num_queries, heads * group, dim), _normal(setting, 300, heads, dim)
    lse = torch.full((num_queries, heads * group), 6.0, device=setting.device)
    return queries, lse, keys, torch.randperm(300)[:num_keys].to(setting.device)


def _exact(args: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    queries, lse, keys, slots = (x.cpu() for x in args)
    return queries.float(), lse, keys.float(), slots


def _window(setting: Setting) -> tuple[Tensor, Tensor]:
    args = _scored(setting, 8, 200)
    got = window_scores(*args, sm_scale=setting.sm_scale, key_start=0, query_start=196, kernel_size=7)
    mean, pooled = key_scores_cpu(*_exact(args), setting.sm_scale, -196, "mean", 7)
    assert pooled is not None
    return torch.cat(got).cpu(), torch.cat([pooled, mean])


def _accumulated(setting: Setting, reduction: Any) -> tuple[Tensor, Tensor]:
    args = _scored(setting, 50, 150)
    got = accumulated_attention(*args, sm_scale=setting.sm_scale, key_start=0, query_start=100, reduction=reduction)
    return got.cpu(), key_scores_cpu(*_exact(args), setting.sm_scale, -100, reduction)[0]


def _paths(setting: Setting, new_lens: list[int]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Three requests, the last two on one span, one of them on another span too."""
    layers, heads, slots = 2, setting.num_kv_heads, 400
    shared, own = (_span(setting, layers, heads, slots, longest) for longest in (90, 50))
    k, v = (_normal(setting, layers, slots, heads, setting.head_dim) for _ in range(2))
    geometry = KVGeometry(layers, heads * setting.group_size, heads, setting.head_dim, slots)
    batch = AttentionBatch(
        paths=((), (shared,), (shared, own)),
        seq_lens=[60, 100 + 30, 100 + 60 + 70],
        extend_lens=new_lens,
        req_pool_indices=torch.arange(3, device=k.device),
        req_to_token=torch.stack([torch.randperm(slots) for _ in range(3)]).int().to(k.device),
    )
    q = _normal(setting, sum(new_lens), geometry.num_qo_heads, setting.head_dim)
    attention, plain = TritonAttention(geometry, k, v), TorchAttention(geometry, k.float(), v.float())
    attention.plan(batch)
    plain.plan(batch)
    return attention.run(1, q, setting.sm_scale), plain.run(1, q.float(), setting.sm_scale)


def _span(setting: Setting, layers: int, heads: int, slots: int, longest: int) -> SpanRuns:
    lens = torch.randint(0, longest + 1, (layers, heads), dtype=torch.int32)
    starts = (lens.flatten().cumsum(0) - lens.flatten()).view(lens.shape).int()
    head_slots = torch.randperm(layers * slots * heads)[: int(lens.sum())].int()
    num_tokens = longest + 10
    rows, starts, lens = (x.to(setting.device) for x in (head_slots, starts, lens))
    return SpanRuns(rows, starts, lens, num_tokens, torch.zeros_like(rows))
