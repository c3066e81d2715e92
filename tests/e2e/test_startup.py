"""Wrong settings are refused at start with every reason; right ones also work through ``sgl.Engine``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from helpers.e2e_env import ENV
from sgl_kvevict.launcher import LaunchError, config_env

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TINY = ("--skip-tokenizer-init", "--max-total-tokens", "2000", "--context-length", "1024")

ENGINE = """
import sys
import sglang as sgl

if __name__ == "__main__":
    engine = sgl.Engine(
        model_path=sys.argv[1], device="cpu", skip_tokenizer_init=True, max_total_tokens=2000,
        radix_cache_backend="kvevict", attention_backend="kvevict", log_level="info",
    )
    prompt = [i * 7 % 500 + 3 for i in range(600)]
    for suffix in ([5], [6, 7]):
        out = engine.generate(input_ids=prompt + suffix, sampling_params={"temperature": 0, "max_new_tokens": 4})
    print("CACHED", out["meta_info"]["cached_tokens"], len(out["output_ids"]))
    engine.shutdown()
"""


def test_every_reason_is_listed_at_once(start, tiny_llama):
    wrong = ("--page-size", "4", "--attention-backend", "torch_native", "--disable-radix-cache")
    with pytest.raises(LaunchError) as error:
        start(tiny_llama, *TINY, *wrong, config={"budget": 0.2})
    message = str(error.value)
    assert "--page-size is 4, only 1 is supported" in message
    assert "the attention backend is TorchNativeAttnBackend; start with --attention-backend kvevict" in message
    assert "--disable-radix-cache is True, only False is supported" in message


def test_attention_backend_alone_is_refused(start, tiny_llama):
    with pytest.raises(LaunchError, match="needs the matching --radix-cache-backend kvevict"):
        start(tiny_llama, *TINY, "--attention-backend", "kvevict")


def test_configuration_errors_name_every_field(start, tiny_llama):
    with pytest.raises(LaunchError) as error:
        start(tiny_llama, *TINY, config={"budget": 1.5, "tail": 3})
    assert "budget" in str(error.value) and "1.5" in str(error.value) and "tail" in str(error.value)


def test_engine(tiny_llama, tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    env = {**os.environ, **ENV, **config_env({"policy": "snapkv", "budget": 0.5})}
    run = subprocess.run(
        [sys.executable, str(script), str(tiny_llama)], env=env, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "CACHED 600 4" in run.stdout
    resolved = next(line for line in run.stderr.splitlines() if "kvevict: " in line)
    assert "policy='snapkv', budget=0.5" in resolved and json.dumps(2001 - 1) in resolved
