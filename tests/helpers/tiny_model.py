"""A tiny random llama: real servers that start fast, for tests of everything but the model."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 512
TIE = 1e-3
"""Difference between two logits that the order of additions decides; logits of the tiny models span about 60."""


def save_tiny_llama(folder: Path, seed: int = 0, head_dim: int = 16) -> Path:
    """Write a float32 llama with 3 layers, 8 query and 4 KV heads; weights are large, so that attention matters.

    It has a tokenizer, so that a server can learn its scores.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=head_dim,
        max_position_embeddings=4096,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer beside the model: bytes, and pairs of small letters, so that every text has its tokens."""
    special = ["<pad>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(itertools.product(string.ascii_lowercase, repeat=2))[: VOCAB_SIZE - len(special) - len(letters)]
    vocab = {token: i for i, token in enumerate([*special, *letters, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def lag(model: Any, prompt: list[int], output: list[int]) -> float:
    """How much lower than the best token's an output token's logit is at most, given the tokens before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return float((logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]).max())


def save_adapter(folder: Path, seed: int, rank: int = 4, head_dim: int = 16) -> Path:
    """Write a LoRA adapter of the queries and values of all layers, strong enough to change every answer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, (name, width) in itertools.product(range(3), (("q_proj", 8 * head_dim), ("v_proj", 4 * head_dim))):
        place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{place}.lora_A.weight"] = torch.randn(rank, 128, generator=generator) * 0.1
        tensors[f"{place}.lora_B.weight"] = torch.randn(width, rank, generator=generator) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
