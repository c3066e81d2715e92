"""Runs an engine of SGLang whose decode steps of two requests are captured, and prints what it generated.

Arguments: model folder, dtype of the KV cache, further options of the engine as JSON. With ``TEST_FP8``, layers have
scales, and a KV cache in float32 holds what float8 keeps of each number.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import sglang as sgl
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


def add_scales() -> None:
    """Give every layer scales, and round what a pool in float32 stores to float8."""
    build, store = RadixAttention.__init__, MHATokenToKVPool.set_kv_buffer

    def with_scales(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.k_scale_float, self.v_scale_float = 0.37 + self.layer_id, 1.3 / (1 + self.layer_id)

    def rounded(self: Any, layer: Any, location: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any) -> None:
        if self.dtype == torch.float32:
            k, v = (
                (x / scale).to(torch.float8_e4m3fn).float() * scale
                for x, scale in ((k, layer.k_scale_float), (v, layer.v_scale_float))
            )
            scales = ()
        store(self, layer, location, k, v, *scales)

    RadixAttention.__init__ = with_scales
    MHATokenToKVPool.set_kv_buffer = rounded


def main(model: str, kv_dtype: str, options: str) -> None:
    if os.environ.get("TEST_FP8"):
        add_scales()
    engine = sgl.Engine(
        model_path=model,
        kv_cache_dtype=kv_dtype,
        device="cpu",
        skip_tokenizer_init=True,
        max_total_tokens=2000,
        context_length=1024,
        radix_cache_backend="kvevict",
        attention_backend="kvevict",
        log_level="warning",
        dtype="float32",
        cuda_graph_config={"decode": {"backend": "full", "bs": [2]}},
        **json.loads(options),
    )
    sampling = [{"temperature": 0, "max_new_tokens": count} for count in (3, 5, 7)]
    prompt = [i * 7 % 500 + 3 for i in range(400)]
    outs = [engine.generate(input_ids=[*prompt, 5], sampling_params=sampling[0])]
    outs += engine.generate(input_ids=[[*prompt, 3, i] for i in range(3)], sampling_params=sampling)
    print("RESULT", json.dumps([(out["output_ids"], out["meta_info"]["cached_tokens"]) for out in outs]), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
