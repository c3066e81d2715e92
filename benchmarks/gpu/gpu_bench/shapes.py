"""Short and long prefills on a compressed prefix, and other geometries than llama-8B's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpu_bench.baselines import Uniform
from gpu_bench.batches import Requests
from gpu_bench.clock import copy_bandwidth, device_seconds, host_seconds
from gpu_bench.setting import Setting

QUICK_REPEATS = 8


def extend(setting: Setting) -> list[dict[str, Any]]:
    """New tokens of one request on a prefix, beside dense attention over as many keys."""
    rows = []
    for prefix, new, bits in extend_sizes(setting):
        sizes = replace(setting, prefix_tokens=prefix, repeats=min(setting.repeats, QUICK_REPEATS))
        requests = Requests(sizes, 1, is_shared=False, is_scattered=True, suffix_tokens=new, new_tokens=new, bits=bits)
        requests.attention.plan(requests.batch())
        seconds = device_seconds(sizes, requests.run)
        row: dict[str, Any] = {"prefix tokens": prefix, "new tokens": new, "bits": bits, "us per layer": seconds * 1e6}
        row["host us per layer"] = host_seconds(sizes, lambda these=requests: these.run(0)) * 1e6
        kept = min(sizes.kept_tokens * requests.per_slot, prefix)
        theirs = Uniform(sizes, 1, kept + new, new).times() if setting.device == "cuda" else {}
        row |= {f"{name}, us": value * 1e6 for name, value in theirs.items()}
        row["times the best"] = seconds / min(theirs.values()) if theirs else "not measured"
        rows.append(row)
        del requests
    return _same_columns(rows)


def extend_sizes(setting: Setting) -> list[tuple[int, int, int]]:
    """Tokens of the prefix, new ones and bits of a row of each line of :func:`extend`."""
    new_tokens = (32, 128, 512, 2048, 8192) if setting.device == "cuda" else (3, 40)
    prefixes = (0, setting.prefix_tokens // 4, setting.prefix_tokens)
    return [
        (prefix, new, bits) for prefix in prefixes for new in new_tokens for bits in (16, 4) if prefix or bits == 16
    ]


def shapes(setting: Setting) -> list[dict[str, Any]]:
    """Decode with other widths and numbers of KV heads, as tensor-parallel ranks have them."""
    copied = copy_bandwidth(setting)
    rows = []
    for head_dim, heads, count in shape_sizes(setting):
        sizes = replace(setting, head_dim=head_dim, num_kv_heads=heads)
        requests = Requests(sizes, count, is_shared=False, is_scattered=True, suffix_tokens=sizes.suffix_tokens)
        requests.attention.plan(requests.batch())
        seconds = device_seconds(sizes, requests.run)
        share = requests.bytes_per_layer() / seconds / copied
        row = {"head_dim": head_dim, "KV heads": heads, "requests": count}
        rows.append(row | {"us per layer": seconds * 1e6, "share of copy": share})
        del requests
    return rows


def shape_sizes(setting: Setting) -> list[tuple[int, int, int]]:
    """Width, KV heads and requests of each line of :func:`shapes`."""
    is_full = setting.device == "cuda"
    widths, heads = ((64, 128, 256), (1, 2, 8)) if is_full else ((16, 32), (1, 2))
    return [(width, count, requests) for width in widths for count in heads for requests in setting.batches[:2]]


def uniform(setting: Setting) -> list[dict[str, Any]]:
    """Decode beside dense decode over as many entries, by every kernel at hand."""
    if setting.device != "cuda":
        return []
    rows = []
    for count in setting.batches:
        requests = Requests(setting, count, is_shared=False, is_scattered=False, suffix_tokens=setting.suffix_tokens)
        requests.attention.plan(requests.batch())
        ours = device_seconds(setting, requests.run)
        del requests
        theirs = Uniform(setting, count, setting.kept_tokens + setting.suffix_tokens, 1).times()
        row: dict[str, Any] = {"requests": count, "ours, us per layer": ours * 1e6}
        row |= {f"{name}, us": value * 1e6 for name, value in theirs.items()}
        row["times the best"] = ours / min(theirs.values()) if theirs else "not measured"
        rows.append(row)
    return _same_columns(rows)


def _same_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fill in what a row lacks because a baseline did not take its sizes."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name, "not measured") for name in names} for row in rows]
