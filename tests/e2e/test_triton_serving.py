"""The GPU's attention behind SGLang without a GPU: a real engine on a CPU whose attention goes to the Triton kernels.

Triton interprets them, and tapes stand in for CUDA graphs. Scheduler, runner of captured steps, tree, compression and
adapter are the real ones; lengths come as device tensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models.families import FAMILIES, config_of
from transformers import AutoModelForCausalLM

from helpers.e2e_env import ENV
from sgl_kvevict.launcher import config_env

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

# Python imports this at the start of every process, the scheduler's too.
SITE = """
import os

if os.environ.get("TEST_TRITON_ATTENTION"):
    from sgl_kvevict.sglang_adapter import compat

    # Before SGLang asks for platforms, which loads the plugin.
    model_executor = "sglang.srt.model_executor."
    for target, hook in (
        ("model_runner_components.cuda_graph_setup.capture_decode_graph", "around_capture_decode_graph"),
        ("runner.decode_cuda_graph_runner.resolve_decode_backend", "around_resolve_decode_backend"),
    ):
        compat.HOOKS += (compat.Hook(model_executor + target, "AROUND", "helpers.tape_runner." + hook, why=""),)

    from dataclasses import replace

    import helpers.quick_interpreter
    import torch
    from sglang.srt.platforms.interface import PlatformCapabilities

    from sgl_kvevict.attention import backend
    from sgl_kvevict.attention.triton.attention import TritonAttention
    from sgl_kvevict.sglang_adapter.platform import KVEvictCpuPlatform

    KVEvictCpuPlatform.capabilities = PlatformCapabilities(graph_capture=True)

    def sharers(batch):
        return len(batch.paths) if len({path for path in batch.paths if path}) == 1 else 0

    class Interpreted(TritonAttention):
        def plan(self, batch):
            super().plan(replace(batch, device_seq_lens=torch.tensor(batch.seq_lens)))
            print("PLAN", sharers(batch), "decode" if batch.extend_lens is None else "extend", flush=True)

        def follow(self, batch, num_requests):
            super().follow(batch, num_requests)
            print("FOLLOW", sharers(batch), "of", num_requests, flush=True)

    backend.TorchAttention = lambda geometry, k, v, biases: Interpreted(geometry, k, v, torch.float32, biases=biases)
    backend.cpu_reasons = lambda name, dtype: []  # float8 is refused on a CPU, where nobody would serve with this

if os.environ.get("TEST_FP8"):
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    build, store = RadixAttention.__init__, MHATokenToKVPool.set_kv_buffer

    def with_scales(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.k_scale_float, self.v_scale_float = 0.37 + self.layer_id, 1.3 / (1 + self.layer_id)

    def rounded(self, layer, location, k, v, *scales):
        if self.dtype == torch.float32:  # the other server's pool: what float8 keeps of each number
            scales = (layer.k_scale_float, layer.v_scale_float)
            k, v = ((x / scale).to(torch.float8_e4m3fn).float() * scale for x, scale in zip((k, v), scales))
            scales = ()
        store(self, layer, location, k, v, *scales)

    RadixAttention.__init__, MHATokenToKVPool.set_kv_buffer = with_scales, rounded
"""

ENGINE = """
import json
import sys

import sglang as sgl

from helpers.preloaded import fork_where_sglang_spawns

if __name__ == "__main__":
    fork_where_sglang_spawns()
    engine = sgl.Engine(
        model_path=sys.argv[1], device="cpu", skip_tokenizer_init=True, max_total_tokens=2000, context_length=1024,
        radix_cache_backend="kvevict", attention_backend="kvevict", log_level="warning", dtype="float32",
        cuda_graph_config={"decode": {"backend": "full", "bs": [2]}}, kv_cache_dtype=sys.argv[2],
        **json.loads(sys.argv[3]),
    )
    sampling = [{"temperature": 0, "max_new_tokens": count} for count in (3, 5, 7)]
    prompt = [i * 7 % 500 + 3 for i in range(400)]
    outs = [engine.generate(input_ids=prompt + [5], sampling_params=sampling[0])]
    outs += engine.generate(input_ids=[prompt + [3, i] for i in range(3)], sampling_params=sampling)
    print("RESULT", json.dumps([(out["output_ids"], out["meta_info"]["cached_tokens"]) for out in outs]))
    engine.shutdown()
"""


def serve(
    folder: Path, model: Path, kv: str, *, is_triton: bool, **options: object
) -> tuple[list[list[object]], list[str]]:
    """What was generated and cached, and the lines of the log; ``options`` are more arguments of the engine."""
    (folder / "sitecustomize.py").write_text(SITE)
    (folder / "engine.py").write_text(ENGINE)
    config = config_env({"policy": "snapkv", "budget": 0.3, "attention": "torch"})
    env = {**os.environ, **ENV, **config, "SGLANG_PLATFORM": "kvevict_cpu"}
    env |= {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "TRITON_INTERPRET": "1" if is_triton else "0"}
    env |= {"TEST_TRITON_ATTENTION": "1"} if is_triton else {}
    env |= {"TEST_FP8": "1"} if kv == "fp8_e4m3" else {}
    arguments = [str(model), kv if is_triton else "auto", json.dumps(options)]
    command = [sys.executable, str(folder / "engine.py"), *arguments]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    results = [line for line in lines if line.startswith("RESULT ")]
    return json.loads(results[0].removeprefix("RESULT ")), lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the device here")
@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
def test_triton_kernels_serve_compressed_prefixes(tiny_llama: Path, tmp_path: Path, kv: str) -> None:
    """The same tokens as with torch's attention: prefill, readers of a compressed prefix, eager and captured decode.

    Steps of two requests are captured: three sharers decode eagerly, two by replays, the last one by replays that a
    second row only fills up. The first request's prompt is compressed between two replays. With float8, layers have
    scales, and the server beside it holds the same numbers in float32.
    """
    want, _ = serve(tmp_path, tiny_llama, kv, is_triton=False)
    got, log = serve(tmp_path, tiny_llama, kv, is_triton=True)
    assert got == want
    assert [cached for _, cached in got] == [0, 400, 400, 400]
    steps = [line for line in log if line.startswith(("PLAN", "FOLLOW", "REPLAY"))]
    alone = steps[: steps.index("PLAN 3 extend")]
    assert alone == ["PLAN 0 extend", "FOLLOW 0 of 2", "REPLAY 1 of 2", "FOLLOW 1 of 2", "REPLAY 1 of 2"]
    together = steps[len(alone) + 1 :]
    assert list(dict.fromkeys(together)) == [
        *("PLAN 3 decode", "FOLLOW 2 of 2", "REPLAY 2 of 2"),
        *("FOLLOW 1 of 2", "REPLAY 1 of 2"),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the device here")
def test_triton_kernels_serve_latents(tmp_path: Path) -> None:
    """The same tokens as with torch's attention, from a tiny DeepSeek V2 whose prefix is compressed.

    Its layers are all dense: experts on a CPU split their rows on the host, which no tape replays.
    """
    family = next(family for family in FAMILIES if family.name == "DeepSeek V2")
    torch.manual_seed(0)
    model, config = tmp_path / "model", config_of(family)
    config.first_k_dense_replace = config.num_hidden_layers
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    want, _ = serve(tmp_path, model, "auto", is_triton=False)
    got, log = serve(tmp_path, model, "auto", is_triton=True)
    assert got == want
    assert [cached for _, cached in got] == [0, 400, 400, 400]
    assert {"PLAN 3 extend", "PLAN 3 decode", "REPLAY 2 of 2"} <= set(log)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the device here")
def test_triton_kernels_verify_drafts(tiny_llama: Path, tmp_path: Path) -> None:
    """The same tokens as without speculation: trees of four drafts over a compressed prefix.

    SGLang replays no verification steps on a CPU, so all are eager; test_graphs.py has the backend's part of a replay.
    """
    want, _ = serve(tmp_path, tiny_llama, "auto", is_triton=False)
    ngram = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    got, log = serve(tmp_path, tiny_llama, "auto", is_triton=True, **ngram)
    assert got == want
    assert "PLAN 3 extend" in log and "PLAN 3 decode" not in log
