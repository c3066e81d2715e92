"""FlashInfer side by side, where it is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

from gpu_bench.batches import Requests
from gpu_bench.clock import device_seconds
from gpu_bench.setting import Setting
from sgl_kvevict.attention.flashinfer.attention import FlashInferAttention


def side_by_side(setting: Setting) -> list[dict[str, Any]]:
    """Our kernels, and FlashInfer on the same spans."""
    if setting.device != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return []
    rows = []
    for count in setting.batches:
        requests = Requests(setting, count, is_shared=False, is_scattered=False, suffix_tokens=setting.suffix_tokens)
        requests.attention.plan(requests.batch())
        ours = device_seconds(setting, requests.run)
        theirs = FlashInferAttention(requests.geometry, requests.k, requests.v)
        theirs.plan(requests.batch())
        spans = device_seconds(setting, lambda i, a=theirs, r=requests: a.run(i % setting.decode_layers, r.q, 0.1))
        error = (theirs.run(0, requests.q, setting.sm_scale)[0].float() - requests.run(0)[0].float()).abs().max()
        rows.append(
            {
                "requests": count,
                "triton, us per layer": ours * 1e6,
                "flashinfer on spans": spans * 1e6,
                "largest difference": float(error),
            }
        )
    return rows
