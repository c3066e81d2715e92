"""Compression of one prefix: moving rows, and all of it, beside a stand-in for the prefill that it follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from gpu_bench.clock import copy_bandwidth, device_seconds, wall_seconds
from gpu_bench.setting import Setting, syncs_raise
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.by_name import build_policy
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.signals import QueryWindow, Signal
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.segment import Segment
from sgl_kvevict.segments.sources import KeptRows, Source, TokenRange

POLICIES = ("ada-snapkv", "random")
WINDOW = 32
LLAMA_8B = {"hidden": 4096, "intermediate": 14336}


class Prefix:
    """An uncompressed prefix in an arena of all layers."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(42)
        self.setting = setting
        heads, tokens = setting.num_kv_heads, setting.prefix_tokens
        num_slots = tokens + 1
        self.geometry = KVGeometry(setting.num_layers, heads * setting.group_size, heads, setting.head_dim, num_slots)
        shape = (setting.num_layers, num_slots, heads, setting.head_dim)
        k, v = (torch.empty(shape, dtype=torch.bfloat16, device=setting.device).normal_() for _ in range(2))
        self.store = SegmentPacker(self.geometry, k, v)
        self.token_slots = torch.arange(1, tokens + 1, device=setting.device)
        queries = (WINDOW, self.geometry.num_qo_heads, setting.head_dim)
        self.queries = torch.empty(queries, dtype=torch.bfloat16, device=setting.device).normal_()
        self.lse = torch.full(queries[:2], 12.0, device=setting.device)
        self.num_kept = setting.kept_tokens * self.geometry.num_runs

    def random_rows(self) -> KeptRows:
        """Kept entries whose runs are uneven."""
        runs, tokens = self.geometry.num_runs, self.setting.prefix_tokens
        score = torch.rand(runs, tokens, device=self.setting.device)
        score *= torch.rand(runs, 1, device=self.setting.device) + 0.5
        kept = torch.zeros(runs * tokens, dtype=torch.bool, device=self.setting.device)
        kept[score.flatten().topk(self.num_kept).indices] = True
        kept = kept.view(runs, tokens)
        lens = kept.sum(1).int().view(self.geometry.num_layers, self.geometry.num_kv_heads)
        return KeptRows(16, kept.flatten().nonzero().squeeze(1), lens, self.num_kept)

    def show(self, layer: int) -> LayerView:
        """What a policy is shown of a layer."""
        return LayerView(
            layer=layer,
            start=0,
            k_buffer=self.store.k_arena[layer],
            v_buffer=self.store.v_arena[layer],
            token_slots=self.token_slots,
            sm_scale=self.setting.sm_scale,
            signals={Signal.WINDOW_QUERIES: QueryWindow(self.queries, self.lse, self.setting.prefix_tokens)},
        )

    def compress(self, policy: Policy) -> None:
        """Scores, selection and packing, as the server does them."""
        order = policy.order(self.show, self.geometry, self.num_kept, 0)
        self.pack(Source(self.geometry, TokenRange(self.token_slots, 0, order.keys)).best(self.setting.kept_tokens))

    def pack(self, source: Source) -> Segment:
        """Move the kept entries into a segment."""
        packed, _ = self.store.rewrite(source, source.fewest_slots)
        return Segment(self.geometry, source.start, source.end, packed)


def compaction(setting: Setting) -> list[dict[str, Any]]:
    """Moving the rows of known entries; bytes with and without the temporary that some of them go through."""
    prefix = Prefix(setting)
    rows, tokens = prefix.random_rows(), TokenRange(prefix.token_slots, 0)
    # Packing fills the first slots; what lies there already cannot move directly.
    assert rows.numbers is not None
    is_there = rows.numbers % setting.prefix_tokens < prefix.geometry.slots_for(prefix.num_kept)
    through_temporary = float(torch.as_tensor(is_there).float().mean())
    seconds = device_seconds(setting, lambda i: prefix.pack(Source(prefix.geometry, tokens, rows)))
    moved = 2 * prefix.num_kept * setting.entry_bytes
    copied = copy_bandwidth(setting)
    return [
        {
            "tokens": setting.prefix_tokens,
            "kept": setting.budget,
            "ms": seconds * 1e3,
            "MB read and written once": moved / 1e6,
            "share of copy": moved / seconds / copied,
            "share of copy, temporary counted": (1 + through_temporary) * moved / seconds / copied,
        }
    ]


def compression(setting: Setting) -> list[dict[str, Any]]:
    """All of a compression, beside the prefill's matrix products and attention."""
    prefix = Prefix(setting)
    prefill = prefill_seconds(setting)
    rows = []
    for name in POLICIES:
        policy = build_policy(name, {})
        assert policy is not None
        prefix.compress(policy)
        with syncs_raise(setting):
            prefix.compress(policy)
        seconds = wall_seconds(setting, lambda i, used=policy: prefix.compress(used))  # launches count
        rows.append(
            {
                "policy": name,
                "tokens": setting.prefix_tokens,
                "ms": seconds * 1e3,
                "prefill stand-in, ms": prefill * 1e3,
                "share": seconds / prefill,
            }
        )
    return rows


def prefill_seconds(setting: Setting) -> float:
    """One layer's matrix products and causal attention of llama-8B, times the layers; a lower bound of a prefill."""
    scale = 1 if setting.device == "cuda" else 64
    hidden, inner = LLAMA_8B["hidden"] // scale, LLAMA_8B["intermediate"] // scale
    heads, tokens = setting.num_kv_heads * setting.group_size, setting.prefix_tokens
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": setting.device}

    def weight(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, **options).normal_(std=0.02)

    width = (heads + 2 * setting.num_kv_heads) * setting.head_dim
    qkv, out = weight(hidden, width), weight(heads * setting.head_dim, hidden)
    up, gate, down = weight(hidden, inner), weight(hidden, inner), weight(inner, hidden)
    x = weight(tokens, hidden)

    def layer(i: int) -> Tensor:
        q, k, v = (x @ qkv).split([heads * setting.head_dim, *[setting.num_kv_heads * setting.head_dim] * 2], dim=1)
        q, k, v = (part.view(1, tokens, -1, setting.head_dim).transpose(1, 2) for part in (q, k, v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = attended.transpose(1, 2).reshape(tokens, -1) @ out
        return (silu(y @ gate) * (y @ up)) @ down

    return device_seconds(setting, layer) * setting.num_layers
