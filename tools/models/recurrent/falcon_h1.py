"""A forward of Mamba-2 layers (arXiv 2405.21060, Sec. 2 and 7) for a CPU, which SGLang has not: slow, for tests only.

A server takes it when ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names this folder. Everything around it is SGLang's own: the
model, the pools of states, and which state a request begins with. An answer is right only if that state is.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
from sglang.srt.models.falcon_h1 import FalconH1ForCausalLM
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

EntryClass = FalconH1ForCausalLM


def forward(
    mixer: MambaMixer2,
    *,
    hidden_states: Tensor,
    output: Tensor | None = None,
    layer_cache: Any,
    metadata: Any,
    mup_vector: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """What ``MambaMixer2.forward`` does on a GPU; no states beside the result, which only ``extra_buffer`` wants."""
    projected = mixer.in_proj(hidden_states)[0]
    if mup_vector is not None:
        projected = projected * mup_vector
    gate, inputs, dt = projected.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
    out = torch.zeros_like(gate)
    for rows, slot, is_new in _sequences(metadata):
        if is_new:
            layer_cache.conv[0][slot] = 0
            layer_cache.temporal[slot] = 0
        mixed = _convolve(mixer, inputs[rows], layer_cache.conv[0][slot])
        out[rows] = _scan(mixer, mixed, dt[rows], layer_cache.temporal[slot])
    result = mixer.out_proj(mixer.norm.forward_native(out, gate))[0]
    if output is not None:
        output.copy_(result)
    return result, None, None


def _sequences(metadata: Any) -> list[tuple[slice, int, bool]]:
    """Rows of each request of a forward, the slot of its state, and whether it begins without one."""
    slots = metadata.mamba_cache_indices.tolist()
    first_decode = metadata.num_prefill_tokens
    bounds = [] if not metadata.num_prefills else metadata.query_start_loc[: metadata.num_prefills + 1].tolist()
    bounds = [*bounds[:-1], *range(first_decode, first_decode + metadata.num_decodes + 1)]
    has_state = [True] * len(slots)
    if metadata.num_prefills and metadata.mixed_metadata.has_initial_states is not None:
        has_state[: metadata.num_prefills] = metadata.mixed_metadata.has_initial_states.tolist()
    return [(slice(*bounds[i : i + 2]), slots[i], not has_state[i]) for i in range(len(bounds) - 1)]


def _convolve(mixer: MambaMixer2, inputs: Tensor, state: Tensor) -> Tensor:
    """[num_tokens, conv_dim]: the causal convolution; ``state`` [conv_dim, width - 1] moves on."""
    weights = mixer.conv1d.weight.view(inputs.shape[1], 1, -1)
    seen = torch.cat([state.to(inputs.dtype), inputs.T], dim=1)
    state.copy_(seen[:, -state.shape[1] :])
    return silu(conv1d(seen[None], weights, mixer.conv1d.bias, groups=inputs.shape[1])[0].T)


def _scan(mixer: MambaMixer2, mixed: Tensor, dt: Tensor, state: Tensor) -> Tensor:
    """[num_tokens, intermediate_size]: the recurrence; ``state`` [num_heads, head_dim, state_size] moves on."""
    num_tokens, group = len(mixed), mixer.num_heads // mixer.n_groups
    sizes = [mixer.intermediate_size, mixer.groups_ssm_state_size, mixer.groups_ssm_state_size]
    x, b, c = mixed.float().split(sizes, dim=-1)
    x = x.view(num_tokens, mixer.num_heads, -1)
    b, c = (part.view(num_tokens, mixer.n_groups, -1).repeat_interleave(group, dim=1) for part in (b, c))
    step = softplus(dt.float() + mixer.dt_bias)
    decay, driven = (step * mixer.A).exp(), step[..., None] * x
    out = x * mixer.D[:, None]
    hidden = state.float()
    for token in range(num_tokens):
        hidden = hidden * decay[token, :, None, None] + driven[token][..., None] * b[token, :, None, :]
        out[token] += (hidden * c[token, :, None, :]).sum(-1)
    state.copy_(hidden)
    return out.reshape(num_tokens, -1).to(mixed.dtype)


MambaMixer2.forward = forward
