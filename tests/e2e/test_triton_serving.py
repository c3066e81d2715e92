"""The GPU's attention behind SGLang without a GPU: a real engine on a CPU whose attention goes to the Triton kernels.

Triton interprets them. Scheduler, tree, compression and adapter are the real ones, lengths come as device tensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.e2e_env import ENV
from sgl_kvevict.launcher import config_env

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

# Python imports this at the start of every process, the scheduler's too.
SITE = """
import os

if os.environ.get("TEST_TRITON_ATTENTION"):
    from dataclasses import replace

    import torch

    import kvevict_kernels.ragged_decode
    import kvevict_kernels.ragged_extend
    from sgl_kvevict.attention import backend
    from sgl_kvevict.attention.triton_attention import TritonAttention

    for op in (kvevict_kernels.ragged_decode, kvevict_kernels.ragged_extend):
        op.backend_for = lambda device: "triton"

    class Interpreted(TritonAttention):
        def plan(self, batch):
            super().plan(replace(batch, device_seq_lens=torch.tensor(batch.seq_lens)))
            readers = len(batch.paths) if len({path for path in batch.paths if path}) == 1 else 0
            print("PLAN", readers, batch.extend_lens is None, flush=True)

    backend._BUILDERS["torch"] = Interpreted
"""

ENGINE = """
import json
import sys

import sglang as sgl

if __name__ == "__main__":
    engine = sgl.Engine(
        model_path=sys.argv[1], device="cpu", skip_tokenizer_init=True, max_total_tokens=2000, context_length=1024,
        radix_cache_backend="kvevict", attention_backend="kvevict", log_level="warning", dtype="float32",
    )
    sampling = {"temperature": 0, "max_new_tokens": 5}
    prompt = [i * 7 % 500 + 3 for i in range(400)]
    outs = [engine.generate(input_ids=prompt + [5], sampling_params=sampling)]
    outs += engine.generate(input_ids=[prompt + [3, i] for i in range(3)], sampling_params=sampling)
    print("RESULT", json.dumps([(out["output_ids"], out["meta_info"]["cached_tokens"]) for out in outs]))
    engine.shutdown()
"""


def serve(folder: Path, model: Path, *, is_triton: bool) -> tuple[list[list[object]], str]:
    (folder / "sitecustomize.py").write_text(SITE)
    (folder / "engine.py").write_text(ENGINE)
    env = {**os.environ, **ENV, **config_env({"policy": "snapkv", "budget": 0.3}), "SGLANG_PLATFORM": "kvevict_cpu"}
    env |= {"PYTHONPATH": str(folder), "TRITON_INTERPRET": "1" if is_triton else "0"}
    env |= {"TEST_TRITON_ATTENTION": "1"} if is_triton else {}
    command = [sys.executable, str(folder / "engine.py"), str(model)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    results = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(results[0].removeprefix("RESULT ")), run.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the device here")
def test_triton_kernels_serve_compressed_prefixes(tiny_llama: Path, tmp_path: Path) -> None:
    """The same tokens as with torch's attention: prefill, readers of a compressed prefix, and a shared decode."""
    want, _ = serve(tmp_path, tiny_llama, is_triton=False)
    got, log = serve(tmp_path, tiny_llama, is_triton=True)
    assert got == want
    assert [cached for _, cached in got] == [0, 400, 400, 400]
    assert "PLAN 3 True" in log, "three requests decoded on one span"
