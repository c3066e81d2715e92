"""FlashInfer side by side, where it is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from gpu_bench.batches import Requests
from gpu_bench.setting import Setting, median_seconds
from sgl_kvevict.attention.flashinfer_attention import FlashInferAttention, flashinfer_wrappers


def side_by_side(setting: Setting) -> list[dict[str, Any]]:
    """Our kernels, FlashInfer on the same spans, and FlashInfer's uniform decode over as many entries per head."""
    if setting.device != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return []
    rows = []
    for count in setting.batches:
        requests = Requests(setting, count, is_shared=False, is_scattered=False, suffix_tokens=setting.suffix_tokens)
        requests.attention.plan(requests.batch())
        ours = median_seconds(setting, requests.run)
        theirs = FlashInferAttention(requests.geometry, requests.k, requests.v)
        theirs.plan(requests.batch())
        spans = median_seconds(setting, lambda i, a=theirs, r=requests: a.run(i % setting.decode_layers, r.q, 0.1))
        error = (theirs.run(0, requests.q, setting.sm_scale)[0].float() - requests.run(0)[0].float()).abs().max()
        rows.append(
            {
                "requests": count,
                "triton, us per layer": ours * 1e6,
                "flashinfer on spans": spans * 1e6,
                "flashinfer, uniform": uniform_seconds(setting, requests) * 1e6,
                "largest difference": float(error),
            }
        )
    return rows


def uniform_seconds(setting: Setting, requests: Requests) -> float:
    """The usual paged attention over tokens, as many as a run has entries on average."""
    count, geometry = len(requests.paths), requests.geometry
    length = setting.kept_tokens + setting.suffix_tokens
    wrapper = flashinfer_wrappers(requests.k.device)()
    pages = torch.arange(count * length, dtype=torch.int32, device=setting.device)  # fewer than the arena has
    wrapper.plan(
        torch.arange(count + 1, dtype=torch.int32),
        torch.arange(count + 1, dtype=torch.int32) * length,
        pages,
        torch.ones(count, dtype=torch.int32),
        geometry.num_qo_heads,
        geometry.num_kv_heads,
        setting.head_dim,
        1,
        sm_scale=setting.sm_scale,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    caches = [(k.unsqueeze(1), v.unsqueeze(1)) for k, v in zip(requests.k, requests.v, strict=True)]
    return median_seconds(setting, lambda i: wrapper.run(requests.q, caches[i % len(caches)], return_lse=True))
