"""SGLang's CUDA branches start and answer on a faked H100 (``helpers/fake_gpu``), stock and with the plugin.

What this cannot show is listed in docs/gpu.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from helpers.fake_gpu import setting_up as fake_gpu
from helpers.preloaded import PATCH, ForkedServer, Preloaded
from helpers.traffic import generate
from kvevict_tools.launcher import config_env, launch
from kvevict_tools.measure import plugin_state

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"))

import serve_gpu
from gpu_bench.phases import Phases
from gpu_bench.rows import Rows, read_rows
from gpu_bench.systems import SMALL, TINY, Load, write_random_model

pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one here")]

MODEL = TINY | {"head_dim": 64, "hidden_size": 128}
"""FlashInfer needs this width."""
# float16: Triton's interpreter multiplies bfloat16 wrongly in SGLang's kernels.
FLAGS = (
    *("--skip-tokenizer-init", "--max-total-tokens", "2000", "--context-length", "1024", "--skip-server-warmup"),
    *("--page-size", "1", "--sampling-backend", "pytorch", "--cuda-graph-max-bs-decode", "2"),
    *("--cuda-graph-backend-prefill", "disabled", "--dtype", "float16"),
)
NO_GRAPHS = ("--cuda-graph-backend-decode", "disabled")
OURS = ("--radix-cache-backend", "kvevict", "--attention-backend", "kvevict")
DOCUMENT = [i * 7 % 500 + 3 for i in range(160)]
Spawn = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], ForkedServer]


@dataclass(frozen=True)
class Answers:
    """Tokens and cached tokens of a document and two questions on it; what the server's log says."""

    outputs: list[list[int]]
    cached: list[int]
    log: str
    state: dict[str, Any] | None

    @property
    def replays(self) -> int:
        return sum(line.startswith("REPLAY ") for line in self.log.splitlines())


Ask = Callable[..., Answers]


@pytest.fixture(scope="module")
def spawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spawn]:
    """Starts servers on the faked GPU."""
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(fake_gpu.SITE)
    tests = Path(__file__).resolve().parents[1]
    process = Preloaded(fake_gpu.ENV | {"PYTHONPATH": f"{site}:{tests}"})
    yield lambda command, env, log: process.start(command, {**env, PATCH: fake_gpu.PARTS}, log)
    process.close()


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory, spawn: Spawn) -> Ask:
    """Asks a document and two questions on it of a server on the faked GPU."""
    model = write_random_model(tmp_path_factory.mktemp("model"), MODEL)

    def ask_server(
        *flags: str, budget: float | None = None, attention: str = "auto", num_new: int = 4, **fields: Any
    ) -> Answers:
        env = {}
        if budget is not None:
            flags = (*OURS, *flags)
            config = {"policy": "snapkv", "budget": budget, "min_prefix_tokens": 64, "attention": attention}
            env = config_env(config | fields)
        log = tmp_path_factory.mktemp("server") / "log"
        with launch(model, flags=[*FLAGS, *flags], env=env, log_path=log, spawn=spawn) as server:
            asked = [generate(server, prompt, num_new) for prompt in (DOCUMENT, [*DOCUMENT, 5], [*DOCUMENT, 3, 1])]
            assert server.leak_messages() == []
            state = plugin_state(server)
        outputs = [answer["output_ids"] for answer in asked]
        return Answers(outputs, [answer["meta_info"]["cached_tokens"] for answer in asked], log.read_text(), state)

    return ask_server


@pytest.fixture(scope="module")
def stock(ask: Ask) -> Answers:
    """Stock SGLang with its Triton attention and captured decode steps."""
    return ask("--attention-backend", "triton")


@pytest.fixture(scope="module")
def compressed(ask: Ask) -> Answers:
    """Ours at budget 0.3 with captured decode steps."""
    return ask(budget=0.3)


def test_stock_captures_and_replays(stock: Answers) -> None:
    assert stock.cached == [0, 160, 160]
    assert stock.replays == 9
    assert "Capture target decode CUDA graph end." in stock.log


def test_fa3_is_chosen_and_answers_alike(ask: Ask, stock: Answers) -> None:
    fa3 = ask("--attention-backend", "fa3", *NO_GRAPHS)
    assert (fa3.outputs, fa3.cached) == (stock.outputs, stock.cached)


def test_ours_uncompressed_answers_alike_from_captured_steps(ask: Ask, stock: Answers) -> None:
    ours = ask(budget=1.0)
    assert (ours.outputs, ours.cached, ours.replays) == (stock.outputs, stock.cached, stock.replays)


def test_ours_on_flashinfer_answers_alike(ask: Ask, stock: Answers) -> None:
    """It plans on the host: captured decode steps are switched off by name."""
    ours = ask(budget=1.0, attention="flashinfer")
    assert (ours.outputs, ours.cached, ours.replays) == (stock.outputs, stock.cached, 0)
    assert "CUDA graphs of decode steps are switched off: attention 'flashinfer' plans on the host." in ours.log


def test_a_compressed_prefix_is_read_by_captured_steps(ask: Ask, stock: Answers, compressed: Answers) -> None:
    """The same tokens as eagerly, and as with the other attention; not those of the whole prefix."""
    assert (compressed.cached, compressed.replays) == (stock.cached, 9)
    assert ask(*NO_GRAPHS, budget=0.3).outputs == compressed.outputs
    assert ask(budget=0.3, attention="flashinfer").outputs == compressed.outputs
    assert compressed.outputs != stock.outputs
    assert compressed.state is not None and compressed.state["leaked_slots"] == 0


def served(
    plan: Sequence[str], load: Load, folder: Path, spawn: Spawn, *, is_gpu: bool
) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of ``serve_gpu.py`` by system and phase; mixed traffic is one round."""
    rows = Rows(folder, "fake" if is_gpu else "CPU", 3600.0, load.sizes())
    phases = Phases(rows, load, write_random_model(folder / "model", load.model), folder, is_gpu=is_gpu, spawn=spawn)
    phases.mixed_seconds = 0.0
    failed = serve_gpu.run(plan, phases, None)
    found = {(row["system"], row["what"]): row for row in read_rows([rows.path]) if "system" in row}
    assert not failed, json.dumps(list(found.values()))
    return found


def test_blocks_of_answers_are_read_by_captured_steps(ask: Ask) -> None:
    """They are compressed beside the steps that go on, and read from the second turn on."""
    fields = {"policy": "streaming-llm", "min_prefix_tokens": 16, "tail_tokens": 4, "answer_block": 16}
    captured = ask(budget=0.3, num_new=30, **fields)
    assert captured.replays == 3 * 29
    assert captured.state is not None and captured.state["leaked_slots"] == 0
    assert captured.state["compressions"] >= 4 and captured.state["errors"] == {}
    assert ask(*NO_GRAPHS, budget=0.3, num_new=30, **fields).outputs == captured.outputs


def test_the_script_for_gpu_servers_starts_them(tmp_path: Path, spawn: Spawn) -> None:
    """``serve_gpu.py`` with its flags for a GPU: every phase."""
    load = replace(SMALL, model=MODEL, pool=900, document=260, question=4, answer=2, excess=1, longest=60)
    found = served(["ours"], load, tmp_path, spawn, is_gpu=True)
    assert found["budget 0.2", "start"]["attention"] == "kvevict"
    assert found["budget 0.2", "start"]["capture_s"] > 0
    assert found["budget 0.2", "cached"]["cached_tokens"] == 260
    assert found["budget 0.2", "leaks"]["leaks"] == 0


def test_answers_and_mixed_traffic_of_tiny_servers(tmp_path: Path, preloaded: Preloaded) -> None:
    """``serve_gpu.py --tiny`` on a CPU."""
    found = served(["answers", "mixed"], SMALL, tmp_path, preloaded.start, is_gpu=False)
    assert found["budget 1.0", "answers"]["like_first"] == "8 of 8"
    mixed = found["budget 0.2", "mixed"]
    assert mixed["leaks"] == mixed["errors"] == 0 and mixed["answered"] > 50 and mixed["aborted"] > 0
