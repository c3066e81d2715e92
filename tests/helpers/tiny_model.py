"""A tiny random llama: real servers that start fast, for tests of everything but the model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 512


def save_tiny_llama(folder: Path, seed: int = 0) -> Path:
    """Write a float32 llama with 3 layers, 8 query and 4 KV heads; weights are large, so that attention matters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
