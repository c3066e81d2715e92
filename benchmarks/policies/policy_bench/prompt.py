"""Prefill a prompt with the attention that is served, and keep what policies look at."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.attention.cpu.long_prefill import LongPrefill, PrefillRequest
from sgl_kvevict.distill.files import ModelIdentity, files_of, load_learned
from sgl_kvevict.distill.fingerprint import fingerprint_of
from sgl_kvevict.distill.weights import ScoreWeights
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.segments.prompt_observation import ObservationSpec, PromptObservation

DOCUMENT = Path(__file__).resolve().parents[3] / "examples" / "data" / "station_handbook.txt"
CHUNK_TOKENS = 4096
"""SGLang's default on a CPU (``--chunked-prefill-size``)."""
ATTENTION = "kvevict_benchmark"
CLOCK = time.process_time
"""CPU seconds of all threads: on cores that are shared with other work they vary far less than time does."""


@dataclass(frozen=True)
class PrefilledPrompt:
    """One prompt after its prefill.

    Attributes:
        geometry: sizes of the model, with a pool just large enough.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim]; token ``t`` is in slot ``t + 1``.
        v_arena: likewise.
        queries: [num_layers, num_tokens, num_qo_heads, head_dim], after RoPE.
        lse: [num_layers, num_tokens, num_qo_heads], float32.
        rotary: the model's rotary embedding.
        sm_scale: softmax scale.
        score_weights: learned ones of the model, if there are any.
        seconds: CPU time of the prefill (the model's layers, no logits).
    """

    geometry: KVGeometry
    k_arena: Tensor
    v_arena: Tensor
    queries: Tensor
    lse: Tensor
    rotary: Rotary
    sm_scale: float
    score_weights: ScoreWeights | None
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return self.queries.shape[1]

    @property
    def kv_bytes(self) -> int:
        """Size of the prompt's uncompressed KV."""
        return 2 * self.num_tokens * self.k_arena[:, 0].numel() * self.k_arena.element_size()

    @property
    def token_slots(self) -> Tensor:
        """[num_tokens], int64."""
        return torch.arange(1, self.num_tokens + 1)

    def chunks(self) -> list[tuple[int, int]]:
        """Parts in which the server prefills the prompt."""
        starts = range(0, self.num_tokens, CHUNK_TOKENS)
        return [(start, min(start + CHUNK_TOKENS, self.num_tokens)) for start in starts]

    def observe(self, spec: ObservationSpec) -> PromptObservation:
        """Collect the signals of a policy again, as the forward pass of the server does."""
        observation = PromptObservation(spec)
        for start, end in self.chunks():
            observation.begin_chunk(start, end, is_last=end == self.num_tokens, token_slots=self.token_slots[:end])
            for layer in range(self.geometry.num_layers):
                observation.record(
                    layer,
                    self.queries[layer, start:end],
                    self.lse[layer, start:end],
                    self.k_arena[layer],
                    self.sm_scale,
                )
        return observation


class DemoModel:
    """The demo model with the served attention in place of its own.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: Path) -> None:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, self._attend)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation=ATTENTION
        ).eval()
        config = self.model.config
        self.shape = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
        self.head_dim = config.hidden_size // config.num_attention_heads
        self._folder = folder
        self._state: dict[str, Any] = {}

    def encode(self, num_tokens: int) -> Tensor:
        """The handbook, again and again, cut to a length; [1, num_tokens]."""
        ids = self.tokenizer(DOCUMENT.read_text(encoding="utf-8"))["input_ids"]
        return torch.tensor([(ids * (num_tokens // len(ids) + 1))[:num_tokens]])

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor) -> PrefilledPrompt:
        """Run a prompt of [1, num_tokens] through all layers, in chunks."""
        num_tokens = token_ids.shape[1]
        geometry = KVGeometry(*self.shape, self.head_dim, num_tokens + 1)
        arena = torch.zeros(2, geometry.num_layers, num_tokens + 1, geometry.num_kv_heads, self.head_dim).bfloat16()
        queries = torch.empty(geometry.num_layers, num_tokens, geometry.num_qo_heads, self.head_dim).bfloat16()
        lse = torch.empty(queries.shape[:3])
        self._state = {"arena": arena, "queries": queries, "lse": lse, "attention": LongPrefill(arena[0], arena[1])}
        begin = CLOCK()
        for start in range(0, num_tokens, CHUNK_TOKENS):
            positions = torch.arange(start, min(start + CHUNK_TOKENS, num_tokens))[None]
            self._state["start"] = start
            self.model.model(token_ids[:, positions[0]], position_ids=positions, use_cache=False)
        seconds = CLOCK() - begin
        scale = self.head_dim**-0.5
        rotary = self._rotary(num_tokens)
        weights = self._score_weights(rotary)
        return PrefilledPrompt(geometry, arena[0], arena[1], queries, lse, rotary, scale, weights, seconds)

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """Attention as transformers calls it: [1, num_heads, num_tokens, head_dim] each."""
        state, layer = self._state, module.layer_idx
        start, end = state["start"], state["start"] + query.shape[2]
        state["arena"][0, layer, start + 1 : end + 1] = key[0].transpose(0, 1)
        state["arena"][1, layer, start + 1 : end + 1] = value[0].transpose(0, 1)
        rows = query[0].transpose(0, 1).contiguous()
        slots = torch.arange(1, end + 1, dtype=torch.int32)
        request = PrefillRequest(slice(0, end - start), (), slots[:start], slots[start:])
        out, lse = state["attention"].run(request, layer, rows, scaling)
        state["queries"][layer, start:end], state["lse"][layer, start:end] = rows, lse
        return out[None], None

    def _score_weights(self, rotary: Rotary) -> ScoreWeights | None:
        num_layers, _, num_heads = self.shape
        fingerprint = fingerprint_of(self._folder) or ""
        identity = ModelIdentity(self._folder.name, fingerprint, num_layers, num_heads, self.head_dim, rotary)
        learned = (load_learned(path, identity).scores for path in files_of(identity) if path.is_file())
        return next((scores for scores in learned if scores is not None), None)

    def _rotary(self, num_tokens: int) -> Rotary:
        positions = torch.arange(num_tokens + 1024)[None]
        cos, sin = self.model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
        half = self.head_dim // 2
        return Rotary(torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1), is_neox=True)
