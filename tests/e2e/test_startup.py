"""Wrong settings are refused at start with every reason; right ones also work through ``sgl.Engine``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from helpers.e2e_env import ENV
from kvevict_tools.launcher import config_env, end_group, free_port, spawn_process

BACKENDS = ("--radix-cache-backend", "kvevict", "--attention-backend", "kvevict")
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


def refused(spawn, log: Path, model, config: dict, *flags: str, code: int = 1) -> list[str]:
    """Lines that SGLang's own command prints until it ends with a code."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu", *TINY]
    with log.open("wb") as file:
        server = spawn([*command, "--port", str(free_port()), *flags], {**ENV, **config_env(config)}, file)
    try:
        assert server.wait(300) == code, log.read_text()[-3000:]
    finally:
        end_group(server.pid, 0, server.poll)
    return log.read_text().rstrip().splitlines()


def test_the_launcher_lists_every_reason_and_starts_nothing(tiny_llama, tmp_path):
    wrong = ("--page-size", "4", "--attention-backend", "torch_native", "--disable-radix-cache")
    flags = ("--radix-cache-backend", "kvevict", *wrong)
    lines = refused(spawn_process, tmp_path / "log", tiny_llama, {"store": "/proc/x"}, *flags)
    assert [line.split(":")[0] for line in lines[-5:]] == [
        "sgl-kvevict",
        "  - the attention backend is 'torch_native'; start with --attention-backend kvevict",
        "  - --disable-radix-cache is True, only False is supported",
        "  - --page-size is 4, only 1 is supported",
        "  - store",
    ]
    assert not any("Traceback" in line or "Scheduler" in line for line in lines)


def test_the_launcher_refuses_a_configuration(tiny_llama, preloaded, tmp_path):
    lines = refused(preloaded.start, tmp_path / "log", tiny_llama, {"policy": "snapvk", "tail": 3}, *BACKENDS)
    assert lines[-2].startswith("sgl-kvevict: error: invalid configuration in KVEVICT_CONFIG")
    assert lines[-1].startswith("  - tail: unknown field (value 3)")


def test_a_scheduler_says_its_reasons(tiny_llama, preloaded, tmp_path):
    flags = (*BACKENDS, "--load-format", "dummy")
    lines = refused(preloaded.start, tmp_path / "log", tiny_llama, {"store": str(tmp_path)}, *flags, code=-9)
    heading = lines.index("sgl_kvevict.errors.UnsupportedSetupError: sgl-kvevict cannot serve this setup:")
    assert lines[heading + 1] == f"  - store is {str(tmp_path)!r}: the model has no safetensors files to know it by"


def test_engine(tiny_llama, preloaded, tmp_path):
    """Started anew, as users do, in ``test_examples.py``."""
    (tmp_path / "embedding.py").write_text(ENGINE)
    env = config_env({"policy": "snapkv", "budget": 0.5}) | {"PYTHONPATH": str(tmp_path)}
    with (tmp_path / "log").open("wb") as file:
        engine = preloaded.start([sys.executable, "-m", "embedding", str(tiny_llama)], env, file)
    try:
        assert engine.wait(300) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        end_group(engine.pid, 0, engine.poll)
    log = (tmp_path / "log").read_text()
    assert "CACHED 600 4" in log
    resolved = next(line for line in log.splitlines() if "kvevict: " in line and "policy=" in line)
    assert "policy='snapkv', budget=0.5" in resolved and json.dumps(2001 - 1) in resolved
