"""The GPU's attention behind SGLang without a GPU: a real engine on a CPU whose attention goes to the Triton kernels.

Triton interprets them, and tapes stand in for CUDA graphs. Scheduler, runner of captured steps, tree, compression and
adapter are the real ones; lengths come as device tensors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, config_of
from transformers import AutoModelForCausalLM

from helpers.e2e_env import ENV
from helpers.preloaded import Preloaded
from kvevict_tools.launcher import config_env, end_group

# Python imports this at the start of a process.
SITE = """
from dataclasses import replace

from sgl_kvevict.sglang_adapter import hooks

# Before SGLang asks for platforms, which loads the plugin.
model_executor = "sglang.srt.model_executor."
tapes = hooks.Feature("tapes", {})
tapes.hooks = tuple(
    hooks.Hook(model_executor + target, "helpers.tape_runner." + function)
    for target, function in (
        ("model_runner_components.cuda_graph_setup.capture_decode_graph", "around_capture_decode_graph"),
        ("runner.decode_cuda_graph_runner.resolve_decode_backend", "around_resolve_decode_backend"),
    )
)
hooks.FEATURES += (tapes,)

import helpers.quick_interpreter
import torch
from sglang.srt.platforms.interface import PlatformCapabilities

from sgl_kvevict import support
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

backend.TorchAttention = lambda geometry, k, v, coding=None: Interpreted(geometry, k, v, torch.float32, coding=coding)
del support.AFTER_LOAD["dtype on a CPU"]  # float8 is refused there, where nobody would serve with this
"""


@pytest.fixture(scope="module")
def interpreting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    """Forks engines whose attention goes to the Triton kernels."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITE)
    process = Preloaded(ENV | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(folder)})
    yield process
    process.close()


@dataclass(frozen=True)
class Engines:
    """Engines with torch's attention and with the Triton kernels; where their output goes."""

    torch: Preloaded
    triton: Preloaded
    folder: Path

    def serve(self, model: Path, kv: str, *, is_triton: bool, **options: object) -> tuple[list[Any], list[str]]:
        """What was generated and cached, and the lines of the log; ``options`` are more arguments of the engine."""
        env = config_env({"policy": "snapkv", "budget": 0.3, "attention": "torch"})
        env |= {"TEST_FP8": "1"} if kv == "fp8_e4m3" else {}
        arguments = [str(model), kv if is_triton else "auto", json.dumps(options)]
        log = self.folder / "log"
        with log.open("wb") as file:
            parent = self.triton if is_triton else self.torch
            engine = parent.start([sys.executable, "-m", "helpers.captured_engine", *arguments], env, file)
        try:
            assert engine.wait(300) == 0, log.read_text()
        finally:
            end_group(engine.pid, 0, engine.poll)
        lines = log.read_text().splitlines()
        results = [line for line in lines if line.startswith("RESULT ")]
        return json.loads(results[0].removeprefix("RESULT ")), lines


@pytest.fixture
def engines(preloaded: Preloaded, interpreting: Preloaded, tmp_path: Path) -> Engines:
    return Engines(preloaded, interpreting, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the device here")
@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
def test_triton_kernels_serve_compressed_prefixes(tiny_llama: Path, engines: Engines, kv: str) -> None:
    """The same tokens as with torch's attention: prefill, readers of a compressed prefix, eager and captured decode.

    Steps of two requests are captured: three sharers decode eagerly, two by replays, the last one by replays that a
    second row only fills up. The first request's prompt is compressed between two replays. With float8, layers have
    scales, and the server beside it holds the same numbers in float32.
    """
    want, _ = engines.serve(tiny_llama, kv, is_triton=False)
    got, log = engines.serve(tiny_llama, kv, is_triton=True)
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
def test_triton_kernels_serve_latents(engines: Engines, tmp_path: Path) -> None:
    """The same tokens as with torch's attention, from a tiny DeepSeek V2 whose prefix is compressed.

    Its layers are all dense: experts on a CPU split their rows on the host, which no tape replays.
    """
    family = next(family for family in FAMILIES if family.name == "DeepSeek V2")
    torch.manual_seed(0)
    model, config = tmp_path / "model", config_of(family)
    config.first_k_dense_replace = config.num_hidden_layers
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    want, _ = engines.serve(model, "auto", is_triton=False)
    got, log = engines.serve(model, "auto", is_triton=True)
    assert got == want
    assert [cached for _, cached in got] == [0, 400, 400, 400]
    assert {"PLAN 3 extend", "PLAN 3 decode", "REPLAY 2 of 2"} <= set(log)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the device here")
def test_triton_kernels_verify_drafts(tiny_llama: Path, engines: Engines) -> None:
    """The same tokens as without speculation: trees of four drafts over a compressed prefix.

    SGLang replays no verification steps on a CPU, so all are eager; test_graphs.py has the backend's part of a replay.
    """
    # Without speculation, the overlap schedule would read the first step before the prompt is compressed.
    want, _ = engines.serve(tiny_llama, "auto", is_triton=False, disable_overlap_schedule=True)
    ngram = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    got, log = engines.serve(tiny_llama, "auto", is_triton=True, **ngram)
    assert got == want
    assert "PLAN 3 extend" in log and "PLAN 3 decode" not in log
