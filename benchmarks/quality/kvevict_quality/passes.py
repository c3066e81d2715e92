"""Prefixes scored by passes, outside the server: what a learned score is fitted to and compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvevict_kernels.key_scores import accumulated_attention
from kvevict_kernels.rotary import Rotary
from sgl_kvevict.attention.cpu.long_prefill import LongPrefill, PrefillRequest
from sgl_kvevict.cache.probes import repetition_probes

ATTENTION = "kvevict_passes"
KEPT_ATTENTION = "kvevict_kept"
CHUNK_TOKENS = 2048
PASS_TOKENS = 512
WINDOW = 32
TAIL = 32
"""Last tokens of a prompt that are never compressed, as configured by default."""


@dataclass(frozen=True)
class ScoredPrefix:
    """A prompt after its prefill and its passes.

    Attributes:
        k: [num_layers, num_tokens, num_kv_heads, head_dim], bfloat16, after RoPE.
        v: likewise.
        queries: [num_layers, WINDOW, num_qo_heads, head_dim], bfloat16, after RoPE: the last ones.
        lse: [num_layers, WINDOW, num_qo_heads], float32.
        scores: [num_layers, num_kv_heads, num_tokens - TAIL], float32: the root of the readers' squared attention.
    """

    k: Tensor
    v: Tensor
    queries: Tensor
    lse: Tensor
    scores: Tensor


class PassModel:
    """A llama model in transformers, with the served attention in place of its own.

    Args:
        folder: of the model.
        positions: longest prompt with its probe (tokens).
    """

    def __init__(self, folder: Path, positions: int = 8192) -> None:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, self._attend)
        ALL_ATTENTION_FUNCTIONS.register(KEPT_ATTENTION, self._attend_to_kept)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=ATTENTION)
        self.model = model.eval()
        config = model.config
        self.num_layers, self.num_heads = config.num_hidden_layers, config.num_key_value_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), torch.arange(positions)[None])
        half = self.head_dim // 2
        self.rotary = Rotary(torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1), is_neox=True)
        self._state: dict[str, Any] = {}

    @torch.inference_mode()
    def score(self, ids: Sequence[int]) -> ScoredPrefix:
        """Prefill a prompt and have it repeated, as the server does."""
        self.model.set_attn_implementation(ATTENTION)
        num_tokens = len(ids)
        end = num_tokens - TAIL
        slots = num_tokens + 2 * PASS_TOKENS
        arena = torch.zeros(2, self.num_layers, slots, self.num_heads, self.head_dim, dtype=torch.bfloat16)
        state = self._state = {
            "arena": arena,
            "attention": LongPrefill(arena[0], arena[1]),
            "windows": [None] * self.num_layers,
            "squares": torch.zeros(self.num_layers, self.num_heads, end),
            "reads": False,
        }
        for start in range(0, num_tokens, CHUNK_TOKENS):
            self._forward(ids[start : start + CHUNK_TOKENS], start)
        queries, lse = (torch.stack([window[i] for window in state["windows"]]) for i in range(2))
        state["reads"] = True
        probes = repetition_probes(self.tokenizer, ids[:end])
        while not probes.is_empty:
            self._forward(probes.next(PASS_TOKENS), num_tokens)
            probes.was_read()
        return ScoredPrefix(
            arena[0, :, :num_tokens].clone(), arena[1, :, :num_tokens].clone(), queries, lse, state["squares"].sqrt()
        )

    @torch.inference_mode()
    def predict(self, prefix: ScoredPrefix, kept: Tensor, ids: Sequence[int], num_last: int) -> Tensor:
        """Log-probabilities [choices, num_last, words] after each of the last of the tokens that follow a prefix.

        ``kept``, [choices, num_layers, num_kv_heads, num_tokens], bool: entries of the prefix that stay.
        """
        self.model.set_attn_implementation(KEPT_ATTENTION)
        self._state = {"prefix": prefix, "kept": kept}
        start = prefix.k.shape[1]
        positions = torch.arange(start, start + len(ids))[None].expand(len(kept), -1)
        hidden = self.model.model(
            torch.tensor([list(ids)]).expand(len(kept), -1), position_ids=positions, use_cache=False
        ).last_hidden_state[:, -num_last:]
        logits: Tensor = self.model.lm_head(hidden).float()
        return logits.log_softmax(-1)

    def _attend_to_kept(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """As :meth:`_attend`, in float32: [choices, num_heads, num_tokens, head_dim] each."""
        prefix, kept = self._state["prefix"], self._state["kept"][:, module.layer_idx]
        num_new, groups = query.shape[2], query.shape[1] // key.shape[1]
        stored_k, stored_v = (x[module.layer_idx].float().transpose(0, 1) for x in (prefix.k, prefix.v))
        rows = query.float().unflatten(1, (-1, groups)).flatten(2, 3)  # [choices, num_kv_heads, groups * num_new, dim]
        to_prefix = (rows @ stored_k.mT * scaling).masked_fill_(~kept[:, :, None], float("-inf"))
        is_later = torch.ones(num_new, num_new, dtype=torch.bool).triu(1).repeat(groups, 1)
        to_new = (rows @ key.float().mT * scaling).masked_fill_(is_later, float("-inf"))
        weights = torch.cat([to_prefix, to_new], dim=-1).softmax(-1)
        out = weights[..., :-num_new] @ stored_v + weights[..., -num_new:] @ value.float()
        return out.unflatten(2, (groups, num_new)).flatten(1, 2).transpose(1, 2).to(query.dtype), None

    def _forward(self, ids: Sequence[int], start: int) -> None:
        self._state["start"] = start
        positions = torch.arange(start, start + len(ids))[None]
        self.model.model(torch.tensor([list(ids)]), position_ids=positions, use_cache=False)

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """Attention as transformers calls it: [1, num_heads, num_tokens, head_dim] each."""
        state, layer, start = self._state, module.layer_idx, self._state["start"]
        end = start + query.shape[2]
        state["arena"][0, layer, start:end] = key[0].transpose(0, 1)
        state["arena"][1, layer, start:end] = value[0].transpose(0, 1)
        rows = query[0].transpose(0, 1).contiguous()
        slots = torch.arange(end, dtype=torch.int32)
        request = PrefillRequest(slice(0, end - start), (), slots[:start], slots[start:])
        out, lse = state["attention"].run(request, layer, rows, scaling)
        if state["reads"]:
            state["squares"][layer] += accumulated_attention(
                rows,
                lse.contiguous(),
                state["arena"][0, layer],
                torch.arange(state["squares"].shape[-1]),
                sm_scale=scaling,
                key_start=0,
                query_start=start,
                reduction="squares",
            )
        else:
            state["windows"][layer] = (rows[-WINDOW:].clone(), lse[-WINDOW:].clone())
        return out[None], None
