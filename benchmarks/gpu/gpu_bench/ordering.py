"""Streams as SGLang's overlap schedule has them: whoever moves or releases rows waits for whole forwards.

Forwards read a span on one stream. The scheduler's stream then moves the span's entries to other slots and poisons the
old ones with NaN; the next forward reads the new place. Results must stay bit-equal. Without the fence a forward reads
poison: that this is seen shows that the check can fail.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpu_bench.batches import Requests
from gpu_bench.clock import synchronize
from gpu_bench.setting import Setting
from kvevict_kernels.compact_kv import compact_kv
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.triton.attention import TritonAttention

ROUNDS = 20


def poisoned_slots(setting: Setting) -> list[dict[str, Any]]:
    """One row with the fence, one without."""
    rows = []
    forwards = ROUNDS if setting.device == "cuda" else 2
    for is_fenced in (True, False) if setting.device == "cuda" else (True,):
        wrong = _rounds(setting, forwards, is_fenced=is_fenced)
        rows.append({"fence": is_fenced, "forwards": forwards, "wrong forwards": wrong})
    return rows


def _rounds(setting: Setting, forwards: int, *, is_fenced: bool) -> int:
    """Forwards whose results differ from those of the first."""
    requests = Requests(setting, 4, is_shared=True, is_scattered=False, suffix_tokens=8)
    heads, slots = requests.geometry.num_kv_heads, requests.geometry.num_token_slots
    span = requests.spans[0]
    # A second home for the entries: an arena twice as large, whose upper half is free.
    arenas = [torch.cat([arena, torch.full_like(arena, float("nan"))], dim=1) for arena in (requests.k, requests.v)]
    requests.k, requests.v = arenas
    entry_layers = span.rows.long() // (slots * heads)
    low = (span.rows.long() + entry_layers * slots * heads).int()
    runs = span.starts, span.lens, span.num_tokens, span.positions
    homes = [SpanRuns(place, *runs) for place in (low, low + slots * heads)]
    attention = _attention(requests)
    streams = [torch.cuda.Stream() for _ in range(2)] if setting.device == "cuda" else []
    synchronize(setting)
    wrong: list[Tensor] = []
    first: list[Tensor] = []
    for i in range(forwards):
        here, there = homes[i % 2], homes[(i + 1) % 2]
        with _on(streams, 0):
            if streams:
                streams[0].wait_stream(streams[1])
            attention.plan(_batch(requests, here))
            layers = range(setting.decode_layers)
            outs = [attention.run(layer, requests.q, setting.sm_scale)[0] for layer in layers for _ in range(3)]
            first = first or outs
            wrong.append(torch.stack([(a != b).any() for a, b in zip(outs, first, strict=True)]).any())
        with _on(streams, 1):
            if streams and is_fenced:
                streams[1].wait_stream(streams[0])
            compact_kv(requests.k, requests.v, here.rows, there.rows)
            for arena in arenas:
                arena.view(-1, setting.head_dim)[here.rows.long()] = float("nan")
    synchronize(setting)
    return int(torch.stack(wrong).sum())


def _attention(requests: Requests) -> TritonAttention:
    geometry = replace(requests.geometry, num_token_slots=requests.k.shape[1])
    return TritonAttention(geometry, requests.k, requests.v)


def _batch(requests: Requests, span: SpanRuns) -> AttentionBatch:
    return replace(requests.batch(), paths=((span,),) * len(requests.paths))


def _on(streams: list[Any], which: int) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.stream(streams[which]) if streams else contextlib.nullcontext()
