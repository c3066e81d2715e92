"""A prompt of the demo model, compressed as a server would, and text that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from policy_bench.prompt import DemoModel, PrefilledPrompt
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies import Decision, LayerView, configured_policy
from sgl_kvevict.segments import PromptObservation
from sgl_kvevict.segments.prompt_observation import ObservationSpec

ATTENTION = "kvevict_compressed"


@dataclass(frozen=True)
class Kept:
    """What a policy kept of one prompt.

    Attributes:
        decision: entries, and how evicted ones were merged.
        num_range: tokens that it decided over; the tail follows.
        mask: [num_layers, num_kv_heads, num_range], bool.
    """

    decision: Decision
    num_range: int
    mask: Tensor


@dataclass
class Compressible:
    """One prefilled prompt and what was observed of it."""

    prompt: PrefilledPrompt
    _observations: dict[Any, PromptObservation] = field(default_factory=dict)

    @torch.inference_mode()
    def keep(self, policy: str, budget: float | int, options: Mapping[str, Any] | None = None, **fields: Any) -> Kept:
        """Let a policy decide, with the sizes that a server would use."""
        config, built = configured_policy(
            KVEvictConfig(policy=policy, budget=budget, policy_options=dict(options or {}), **fields)
        )
        assert built is not None
        prompt = self.prompt
        num_range = prompt.num_tokens - config.tail_tokens
        slots = prompt.token_slots[:num_range]
        key = (built.needs, built.window_size)
        if key not in self._observations:
            spec = ObservationSpec(prompt.geometry, *key, prompt.rotary, prompt.output_grams)
            self._observations[key] = prompt.observe(spec)

        def show(layer: int) -> LayerView:
            seen = self._observations[key]
            return seen.show(layer, 0, prompt.k_arena[layer], prompt.v_arena[layer], slots)

        num_slots = config.num_slots(num_range)
        total = num_slots * prompt.geometry.num_runs
        decision = built.select(show, prompt.geometry, total, min(config.sink_tokens, num_slots))
        return Kept(decision, num_range, mask_of(decision, num_range))

    def entries(self, kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
        """What later tokens read: kept entries, then the tail.

        Returns:
            Keys and values [num_layers, num_kv_heads, longest, head_dim], bfloat16, and [num_layers, num_kv_heads,
            longest], bool, which of them there are.
        """
        prompt, lens = self.prompt, kept.decision.selection.keep_lens
        num_layers, num_heads = lens.shape
        tail = prompt.token_slots[kept.num_range :]
        longest = int(lens.max()) + tail.numel()
        valid = torch.zeros(num_layers, num_heads, longest, dtype=torch.bool)
        valid[:] = torch.arange(longest) < lens[..., None]
        found = []
        for arena in (prompt.k_arena, prompt.v_arena):
            padded = torch.zeros(num_layers, num_heads, longest, arena.shape[-1], dtype=arena.dtype)
            padded[valid] = stored_rows(kept.decision, arena)
            padded[:, :, longest - tail.numel() :] = arena[:, tail].transpose(1, 2)
            found.append(padded)
        valid[:, :, longest - tail.numel() :] = True
        return found[0], found[1], valid


def mask_of(decision: Decision, num_tokens: int) -> Tensor:
    """Kept tokens as [num_layers, num_kv_heads, num_tokens], bool."""
    lens = decision.selection.keep_lens
    runs = torch.repeat_interleave(lens.flatten().long())
    mask = torch.zeros(lens.numel(), num_tokens, dtype=torch.bool)
    mask[runs, decision.selection.indices.long()] = True
    return mask.view(*lens.shape, num_tokens)


def stored_rows(decision: Decision, arena: Tensor) -> Tensor:
    """Rows of all kept entries, run after run, merged ones included: [num_entries, head_dim]."""
    selection, merge = decision.selection, decision.merge
    if merge is None:
        runs = torch.repeat_interleave(selection.keep_lens.flatten().long())
        num_heads = selection.keep_lens.shape[1]
        return arena[runs // num_heads, selection.indices.long() + 1, runs % num_heads]
    rows = arena[merge.layers.long(), merge.indices.long() + 1, merge.heads.long()].float() * merge.weights[:, None]
    entry = torch.repeat_interleave(merge.indptr.diff().long())
    return torch.zeros(selection.num_entries, rows.shape[1]).index_add_(0, entry, rows).to(arena.dtype)


class ContinuingModel:
    """The demo model, which goes on from a compressed prompt."""

    def __init__(self, demo: DemoModel) -> None:
        self.demo = demo
        self._state: tuple[Tensor, Tensor, Tensor] | None = None
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, self._attend)

    @torch.inference_mode()
    def loss(self, compressible: Compressible, kept: Kept, continuation: Tensor) -> float:
        """Mean negative log-likelihood of a continuation after its first token, in nats.

        Args:
            compressible: the prompt.
            kept: what is kept of it.
            continuation: [num_tokens], int64.
        """
        self._state = compressible.entries(kept)
        model, start = self.demo.model, compressible.prompt.num_tokens
        before = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        try:
            positions = torch.arange(start, start + continuation.numel())[None]
            logits = model(continuation[None], position_ids=positions, use_cache=False).logits
        finally:
            model.set_attn_implementation(before)
        return float(cross_entropy(logits[0, :-1].float(), continuation[1:]))

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """Attention as transformers calls it: [1, num_heads, num_tokens, head_dim] each."""
        assert self._state is not None
        keys, values, valid = (part[module.layer_idx] for part in self._state)
        new = key.shape[2]
        keys, values = torch.cat((keys, key[0]), 1), torch.cat((values, value[0]), 1)
        seen = valid[:, None].expand(-1, new, -1)
        causal = torch.ones(new, new, dtype=torch.bool).tril().expand(seen.shape[0], -1, -1)
        allowed = torch.cat((seen, causal), -1)
        group = query.shape[1] // keys.shape[0]
        keys, values, allowed = (part.repeat_interleave(group, 0)[None] for part in (keys, values, allowed))
        out = scaled_dot_product_attention(query, keys, values, attn_mask=allowed, scale=scaling)
        return out.transpose(1, 2), None
