"""What happens once: the first read of a span, a new batch, the start, the first compression after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from gpu_bench.clock import synchronize
from gpu_bench.insertion import POLICIES, Prefix
from gpu_bench.setting import Setting
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies.by_name import build_policy
from sgl_kvevict.segments import Compressor, Span, warm_up


def first_times(setting: Setting) -> list[dict[str, Any]]:
    """Wall time of each, on an idle device; compilations are cold unless Triton's cache on disk holds them."""
    prefix = Prefix(setting)
    rows = []

    def timed(what: str, call: Callable[[], Any]) -> Any:
        synchronize(setting)
        start = time.perf_counter()
        result = call()
        host = time.perf_counter() - start
        synchronize(setting)
        rows.append({"what": what, "host ms": host * 1e3, "ms": (time.perf_counter() - start) * 1e3})
        return result

    attention = TritonAttention(prefix.geometry, prefix.store.k_arena, prefix.store.v_arena)
    timed("warm-up of attention", attention.warm_up)
    for name in POLICIES:
        policy = build_policy(name, {})
        assert policy is not None
        config = KVEvictConfig(policy=name, budget=setting.budget)
        spec = Compressor(config, policy, prefix.store)
        timed(f"warm-up of {name}", lambda used=spec: warm_up(used, prefix.store.k_arena.dtype))
        timed(f"first compression, {name}", lambda used=policy: prefix.compress(used))
        timed(f"second compression, {name}", lambda used=policy: prefix.compress(used))
    segment = prefix.pack(prefix.selection())
    whole = Span(segment, 0, setting.prefix_tokens, is_owner=True)
    timed("first read of a whole span", whole.runs)
    upper, lower = whole.split(setting.prefix_tokens // 3)
    timed("first read of a part", upper.runs)
    timed("first read of another part", lower.runs)
    assert int(torch.stack([runs.lens for runs in (*upper.runs(), *lower.runs())]).sum()) == segment.num_entries
    return rows
