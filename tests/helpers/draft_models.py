"""Tiny models with draft models that read their hidden states, and are right about as often as not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from helpers.tiny_model import VOCAB_SIZE, save_tiny_llama, save_tokenizer

CHAINS = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
TREES = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6")
HIDDEN = 128
AFTER = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
"""The token that mostly follows a token."""
EMBEDDED = 32.0
"""How much louder a token is than what attention adds to it: what else follows, attention decides."""


def save_target(folder: Path) -> Path:
    """Write the tiny llama, with answers that can be guessed; and as MiMo, with a layer that drafts, beside it."""
    save_tokenizer(save_tiny_llama(folder))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= EMBEDDED
    tensors["lm_head.weight"][AFTER] = tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def save_eagle(folder: Path, target: Path) -> Path:
    """Write a ``LlamaForCausalLMEagle``: it guesses from the token, which it gets beside the target's hidden state."""
    shapes = _layer_shapes("layers.0", HIDDEN)
    tensors = _random(shapes) | {"layers.0.post_attention_layernorm.weight": torch.ones(HIDDEN)}
    tensors |= {"fc.weight": torch.eye(HIDDEN, 2 * HIDDEN), "fc.bias": torch.zeros(HIDDEN)}
    tensors["embed_tokens.weight"] = _embeddings(target)
    return _save(folder, target, tensors, architectures=["LlamaForCausalLMEagle"])


def save_eagle3(folder: Path, target: Path) -> Path:
    """Write a ``LlamaForCausalLMEagle3``: of the hidden states of three layers it guesses from those before the first.

    They tell of the token before the last one. It guesses even tokens only, and only the first draft is ever right.
    """
    shapes = _layer_shapes("midlayer", 2 * HIDDEN)
    norms = ("midlayer.post_attention_layernorm", "midlayer.hidden_norm", "midlayer.input_layernorm", "norm")
    tensors = _random(shapes) | {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    tensors["fc.weight"] = torch.eye(HIDDEN, 3 * HIDDEN)
    two_before = AFTER.argsort()[AFTER.argsort()]
    tensors["lm_head.weight"] = _embeddings(target)[two_before][::2].contiguous()
    tensors["d2t"] = torch.arange(VOCAB_SIZE // 2)  # added to a draft's token, gives the target's
    more = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB_SIZE // 2}
    return _save(folder, target, tensors, **more)


def save_mimo(folder: Path, target: Path) -> Path:
    """Write the target as a MiMo model: the same answers, and a layer that drafts (``NEXTN``), by its attention too."""
    tensors, part = load_file(target / "model.safetensors"), "model.mtp_layers.0"
    config = json.loads((target / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        tensors |= _biases(f"model.layers.{layer}", 128, 64)
    tensors |= _random(_layer_shapes(part, HIDDEN), attention=0.17) | _biases(part, 128, 64)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm")
    tensors |= {f"{part}.{name}.weight": torch.ones(HIDDEN) for name in norms}
    tensors[f"{part}.input_proj.weight"] = torch.eye(HIDDEN, 2 * HIDDEN).roll(HIDDEN, 1)
    more = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    save_tokenizer(folder)
    return _save(folder, target, tensors, **more)


def greedy(target: Path, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """What the target answers, and the log-probability of each token, by transformers."""
    model: Any = LlamaForCausalLM.from_pretrained(target)
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        found = model.generate(
            ids, max_new_tokens=num_tokens, output_logits=True, return_dict_in_generate=True, **options
        )
    answer: list[int] = found.sequences[0, len(prompt) :].tolist()
    steps = zip(found.logits, answer, strict=True)
    return answer, [float(logits[0].log_softmax(-1)[token]) for logits, token in steps]


def _layer_shapes(part: str, width: int) -> dict[str, tuple[int, int]]:
    """Of a layer with the target's heads, whose attention has ``width`` inputs."""
    shapes = {f"{part}.self_attn.{name}_proj": (size, width) for name, size in (("q", 128), ("k", 64), ("v", 64))}
    shapes |= {f"{part}.mlp.{name}_proj": (HIDDEN, HIDDEN) for name in ("gate", "up", "down")}
    return shapes | {f"{part}.self_attn.o_proj": (HIDDEN, 128)}


def _random(shapes: dict[str, tuple[int, int]], attention: float = 0.02) -> dict[str, Tensor]:
    """Small weights, and those of ``attention``."""
    generator, scales = torch.Generator().manual_seed(1), dict.fromkeys(shapes, 0.02)
    scales |= {name: attention for name in shapes if "self_attn" in name}
    return {f"{name}.weight": torch.randn(shape, generator=generator) * scales[name] for name, shape in shapes.items()}


def _biases(part: str, num_q: int, num_kv: int) -> dict[str, Tensor]:
    sizes = {"q": num_q, "k": num_kv, "v": num_kv}
    return {f"{part}.self_attn.{name}_proj.bias": torch.zeros(size) for name, size in sizes.items()}


def _embeddings(target: Path) -> Tensor:
    return load_file(target / "model.safetensors")["model.embed_tokens.weight"]


def _save(folder: Path, target: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    known = json.loads((target / "config.json").read_text())
    layers = {} if "num_nextn_predict_layers" in config else {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(known | layers | config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
