"""A real server, stock or with compressed prefixes, where SGLang is installed: questions on cached documents.

The model has llama-8B's shape and random weights, so no files are needed; only the times have a meaning. Documents are
compressed when their first request has ended (policy ``ada-snapkv``, which needs no scoring passes).

The first start of a system compiles kernels for minutes. They stay in the caches of FlashInfer, SGLang and Triton, also
when the start runs out of time: then run it again.
"""

from __future__ import annotations

import importlib.util
import json
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_bench.setting import Setting
from kvevict_tools.launcher import RunningServer, System, config_env, kvevict_system, launch, stock_system

QUESTION_TOKENS = 128
TURNS = 3
START_SECONDS = 420.0
"""Of the 570 that a part has."""
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
TINY = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class Load:
    """What is asked.

    Attributes:
        document: tokens of a document.
        documents: how many, each with a question of its own at the same time.
        answer: tokens of an answer.
    """

    document: int
    documents: int
    answer: int


def end_to_end(name: str, setting: Setting) -> list[dict[str, Any]]:
    """Time to the first token of a question on a cached document, and tokens/s of several at once.

    Args:
        name: of the system, see :func:`find_system`.
        setting: device and sizes.

    Returns:
        One row; none where SGLang is missing or the system does not run on the device.
    """
    is_gpu = setting.device == "cuda"
    system = find_system(name, is_gpu)
    if importlib.util.find_spec("sglang") is None or system is None:
        return []
    load = Load(setting.prefix_tokens, 16, 256) if is_gpu else Load(600, 2, 4)
    sizes = LLAMA_8B if is_gpu else TINY
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(sizes))
        start = time.perf_counter()
        with launch(
            model,
            flags=system.flags,
            env=system.env,
            log_path=Path(folder) / "server.log",
            timeout_s=START_SECONDS,
        ) as server:
            seconds = time.perf_counter() - start
            return [{"system": system.name, "s to start": seconds, **ask(server, load, sizes)}]


def find_system(name: str, is_gpu: bool) -> System | None:
    """A system by the name of its part: stock with ``flashinfer`` or ``fa3``, ours ``uncompressed`` or ``compressed``.

    On a CPU ``flashinfer`` stands for SGLang's own attention there, and ``fa3`` for nothing.
    """
    flags = ["--load-format", "dummy", "--skip-tokenizer-init"]
    if not is_gpu:
        flags += ["--max-total-tokens", "8192"]  # SGLang would take most of the memory, and fill it with zeros
    if name in ("flashinfer", "fa3"):
        if is_gpu:
            return System(f"stock, {name}", ("--attention-backend", name, *flags), {})
        return stock_system("stock", flags) if name == "flashinfer" else None
    budget = {"uncompressed": 1.0, "compressed": 0.2}[name]
    config = {"policy": "ada-snapkv", "budget": budget}
    if not is_gpu:
        return kvevict_system(f"budget {budget}", config | {"min_prefix_tokens": 64}, flags)
    ours = ("--radix-cache-backend", "kvevict", "--attention-backend", "kvevict")
    return System(f"budget {budget}", (*ours, *flags), config_env(config))


def ask(server: RunningServer, load: Load, model: dict[str, Any]) -> dict[str, Any]:
    """Cache every document and warm up, then ask: one question alone, then one per document at once."""
    chooser = random.Random(42)

    def tokens(count: int) -> list[int]:
        return [chooser.randrange(10, int(model["vocab_size"])) for _ in range(count)]

    documents = [tokens(load.document) for _ in range(load.documents)]
    for document in documents:
        generate(server, document, 1)
    generate(server, documents[0] + tokens(QUESTION_TOKENS), load.answer)  # what is compiled on first use
    alone = sorted(generate(server, documents[0] + tokens(QUESTION_TOKENS), 1)[1] for _ in range(TURNS))
    prompts = [document + tokens(QUESTION_TOKENS) for document in documents]
    rates = []
    for _ in range(TURNS):
        start = time.perf_counter()
        with ThreadPoolExecutor(load.documents) as pool:
            counts = [count for count, _ in pool.map(lambda prompt: generate(server, prompt, load.answer), prompts)]
        rates.append(sum(counts) / (time.perf_counter() - start))
        prompts = [document + tokens(QUESTION_TOKENS) for document in documents]
    return {
        "ms to first token": alone[len(alone) // 2] * 1e3,
        "tokens/s": sorted(rates)[len(rates) // 2],
        "tokens": load.documents * load.answer,
    }


def generate(server: RunningServer, input_ids: list[int], count: int) -> tuple[int, float]:
    """Ask for ``count`` tokens; how many came, and seconds."""
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    start = time.perf_counter()
    body = {"input_ids": input_ids, "sampling_params": sampling}
    answer = json.loads(server.post("/generate", body, timeout_s=120.0))
    return len(answer["output_ids"]), time.perf_counter() - start
