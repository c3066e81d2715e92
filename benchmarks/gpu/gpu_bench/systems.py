"""Servers that are compared on a GPU: stock SGLang and this plugin, with the same model, pool and limits."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvevict_tools.launcher import System, config_env, kvevict_system, stock_system

ATTENTIONS = {"fa3": "stock, fa3", "triton": "stock, triton", "flashinfer": "stock, flashinfer"}
"""Stock systems: SGLang's name of an attention backend, and the system's name in tables."""
OURS = {"ours": "budget 0.2", "ours-16": "budget 0.2, 16 bits", "ours-full": "budget 1.0"}
"""Our systems. Rows have 4 bits where nothing is said, SGLang's 16 at budget 1.0."""
NAMES = ATTENTIONS | OURS
MODELS = Path(__file__).resolve().parents[3] / "out" / "random-models"
"""Not in ``--out``, which is copied back from the machine."""
POOL = 131_072
"""Token slots, fixed so that a card with more memory caches no more: 17 GB at llama-8B's shape."""
LLAMA_8B: dict[str, Any] = {
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
THIN = LLAMA_8B | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 512}
"""llama-8B's heads, so that its kernels are compiled, in a model that is written and loaded in seconds."""
TINY = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "torch_dtype": "float16",  # which a faked GPU's interpreter multiplies rightly
}


@dataclass(frozen=True)
class Load:
    """What is asked of each server.

    Attributes:
        model: its ``config.json``.
        pool: token slots.
        document: tokens of a document.
        question: tokens of a question.
        answer: tokens of an answer.
        batches: numbers of questions on one document at the same time.
        longest: tokens of the longest prompt of mixed traffic.
        thin: ``config.json`` of the model whose greedy answers are compared, unless there is a real one.
        excess: pools that the documents of the phase "pressure" fill.
    """

    model: dict[str, Any]
    pool: int
    document: int
    question: int
    answer: int
    batches: tuple[int, ...]
    longest: int
    thin: dict[str, Any]
    excess: int = 4

    def sizes(self) -> dict[str, int]:
        """Sizes that a page names."""
        return {"server pool": self.pool, "document": self.document, "question": self.question, "answer": self.answer}


FULL = Load(LLAMA_8B, POOL, document=32_768, question=128, answer=128, batches=(1, 8, 64), longest=4096, thin=THIN)
SMALL = Load(TINY, 4096, document=600, question=16, answer=8, batches=(1, 2), longest=400, thin=TINY)


class MissingError(RuntimeError):
    """A system cannot be started here; the message says what is missing."""


def require(names: Sequence[str]) -> None:
    """Check that SGLang is there, and finds the plugin if one of the systems is ours.

    MissingError: it is not, or does not.
    """
    if importlib.util.find_spec("sglang") is None:
        raise MissingError(
            "SGLang cannot be imported, so no server can start: install it (pip install '.[gpu]'), or run from the "
            "kit's environment (docs/gpu.md)"
        )
    plugins = importlib.metadata.entry_points(group="sglang.srt.plugins").names
    if OURS.keys() & set(names) and "kvevict" not in plugins:
        raise MissingError(
            "SGLang would not find the plugin: no package on the path has the entry point 'kvevict' of group "
            "sglang.srt.plugins (pip install -e . --no-deps; a folder on PYTHONPATH alone has none)"
        )


def find_system(name: str, model: Path, load: Load, *, is_gpu: bool, graphs: bool = True) -> System:
    """Flags and environment of a system.

    Args:
        name: a key of :data:`NAMES`.
        model: folder; without a tokenizer in it prompts are token ids.
        load: pool and limits.
        is_gpu: on a CPU every stock system has SGLang's plain torch attention.
        graphs: decode steps are captured, SGLang's default.
    """
    flags = ["--max-total-tokens", str(load.pool), "--page-size", "1", "--random-seed", "1", "--skip-server-warmup"]
    flags += [] if has_tokenizer(model) else ["--skip-tokenizer-init"]
    config: dict[str, Any] = {"budget": 1.0 if name == "ours-full" else 0.2}
    config |= {"bits": 16} if name == "ours-16" else {}
    config |= {"score_weights": str(scores)} if (scores := scores_of(model)).exists() else {}
    if not is_gpu:
        flags += ["--dtype", "float32"]  # small sizes show that everything works: greedy answers are then the same
        ours = name in OURS
        return kvevict_system(NAMES[name], config, flags) if ours else stock_system(NAMES[name], flags)
    most = str(max(load.batches))
    flags += ["--cuda-graph-max-bs-decode", most, "--max-running-requests", str(max(64, max(load.batches)))]
    flags += ["--chunked-prefill-size", "8192", "--sampling-backend", "pytorch"]
    flags += [] if graphs else ["--cuda-graph-backend-decode", "disabled"]
    if name in OURS:
        chosen = ("--radix-cache-backend", "kvevict", "--attention-backend", "kvevict")
        return System(NAMES[name], (*chosen, *flags), config_env(config))
    return System(NAMES[name], ("--attention-backend", name, *flags), {})


def has_tokenizer(model: Path) -> bool:
    """Whether a model's folder has one."""
    return (model / "tokenizer.json").exists()


def random_model(config: dict[str, Any], device: str) -> Path:
    """The folder of a model with random weights, made at the first call on this machine."""
    folder = MODELS / hashlib.sha256(json.dumps([config, device]).encode()).hexdigest()[:16]
    return folder if scores_of(folder).exists() else write_random_model(folder, config, device)


def write_random_model(folder: Path, config: dict[str, Any], device: str = "cpu") -> Path:
    """Make a model's folder with random weights, so large that attention decides answers; on a CPU the same everywhere.

    SGLang's dummy weights are tiny: all tokens are about as likely, and rounding decides which one is the greatest.
    Beside the folder is a file of learned scores and statistics (:func:`scores_of`) that say nothing, because a model
    without a tokenizer cannot learn them: with it servers have the default policy, and rows of 4 bits.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    dtype, spread = getattr(torch, config["torch_dtype"]), 2.8 * config["hidden_size"] ** -0.5
    with torch.device("meta"):
        weights = LlamaForCausalLM(LlamaConfig(**config, tie_word_embeddings=False)).state_dict()
    files: dict[str, dict[str, torch.Size]] = {}
    for name, weight in weights.items():
        # A file for each layer: llama-8B has 16 GB, of which no more than one is in memory.
        files.setdefault(name.split(".")[2] if ".layers." in name else "rest", {})[name] = weight.shape
    generator = torch.Generator(device).manual_seed(0)
    for part, shapes in files.items():
        made = {name: torch.randn(shape, generator=generator, device=device) * spread for name, shape in shapes.items()}
        made |= {name: torch.ones(shape) for name, shape in shapes.items() if name.endswith("norm.weight")}
        save_file({name: x.to("cpu", dtype) for name, x in made.items()}, folder / f"model-{part}.safetensors")
    if device != "cpu":
        torch.cuda.empty_cache()  # servers are measured beside this process
    _write_scores(folder, config)
    return folder


def scores_of(model: Path) -> Path:
    """The file of learned scores of a folder that :func:`write_random_model` made."""
    return model.parent / f"{model.name}-scores.safetensors"


def _write_scores(folder: Path, config: dict[str, Any]) -> None:
    import torch

    from kvevict_kernels.rotary import Rotary
    from kvevict_kernels.row_codec import RowStatistics
    from sgl_kvevict.distill.files import Learned, ModelIdentity, save_learned
    from sgl_kvevict.distill.fingerprint import fingerprint_of
    from sgl_kvevict.distill.weights import ScoreWeights
    from sgl_kvevict.geometry import KVGeometry

    head_dim = config["head_dim"]
    sizes = config["num_hidden_layers"], config["num_key_value_heads"], head_dim
    angles = torch.outer(torch.arange(2.0), config["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim))
    rotary = Rotary(torch.cat([angles.cos(), angles.sin()], dim=1), is_neox=True)
    scores = ScoreWeights.zeros(KVGeometry(sizes[0], config["num_attention_heads"], *sizes[1:], 1))
    learned = Learned(scores, RowStatistics.neutral(sizes))
    identity = ModelIdentity(folder.name, fingerprint_of(folder) or "", *sizes, rotary)
    save_learned(scores_of(folder), learned, identity)
