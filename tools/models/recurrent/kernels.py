"""What SGLang's kernels of recurrent layers compute, token by token in torch: slow, for tests only.

SGLang compiles these kernels for GPUs. Everything around them is SGLang's own: the models, the pools of states, which
state a request begins with, and where a snapshot goes. Names of arguments are SGLang's where it calls by keyword.

Sources: Mamba-2, arXiv 2405.21060, Sec. 2 and 7; gated delta networks, arXiv 2412.06464, Sec. 3.1.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, sigmoid, silu, softplus

CHUNK = 64
"""Tokens between two states that :func:`chunk_gated_delta_rule` returns, from the beginning of each request."""


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """[dim, num_tokens]: the causal convolution of each request; its state [dim, width - 1] moves on."""
    out = torch.zeros_like(x)
    requests = zip(pairwise(query_start_loc.tolist()), cache_indices.tolist(), has_initial_state.tolist(), strict=True)
    for (start, end), slot, has_state in requests:
        if not has_state:
            conv_states[slot] = 0
        out[:, start:end] = _convolve(x[:, start:end], conv_states[slot], weight, bias)
    return out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """[num_requests, dim]: the same for one token of each request."""
    slots = conv_state_indices.tolist()
    rows = [_convolve(row[:, None], conv_state[slot], weight, bias) for row, slot in zip(x, slots, strict=True)]
    return torch.cat(rows, dim=1).T


def _convolve(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    seen = torch.cat([state.to(x.dtype), x], dim=1)
    state.copy_(seen[:, -state.shape[1] :])
    return silu(conv1d(seen[None], weight[:, None], bias, groups=len(weight))[0])


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    initial_states: Tensor | None,
    cu_seqlens: Tensor,
    track_end_locs: Tensor | None,
    out: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The recurrence of Mamba-2 for several requests, one after the other in ``x`` [1, num_tokens, heads, head_dim].

    Returns:
        States [1, n, heads, head_dim, state_size] before every ``chunk_size``-th token of all; states after each
        request, [num_requests, ...]; states [1, m, ...] before the tokens ``track_end_locs``.
    """
    before: dict[int, Tensor] = {}
    last = []
    for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        state = x.new_zeros(*x.shape[2:], B.shape[-1]).float() if initial_states is None else initial_states[i].float()
        for t in range(start, end):
            before[t] = state
            state, out[0, t] = _mamba_step(state, x[0, t], dt[0, t] + dt_bias, A, B[0, t], C[0, t], D)
        last.append(state)
    chunks = torch.stack([before[t] for t in range(0, x.shape[1], chunk_size)])[None]
    tracked = None
    if track_end_locs is not None and len(track_end_locs):
        tracked = torch.stack([before[t] for t in track_end_locs.tolist()])[None]
    return chunks, torch.stack(last), tracked


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    dt_bias: Tensor,
    state_batch_indices: Tensor,
    out: Tensor,
    **_: Any,
) -> None:
    """The same for one token of each request; per-head numbers come repeated over a head's rows and columns."""
    for i, slot in enumerate(state_batch_indices.tolist()):
        step = dt[i, :, 0] + dt_bias[:, 0]
        after, out[i] = _mamba_step(state[slot].float(), x[i], step, A[:, 0, 0], B[i], C[i], D[:, 0])
        state[slot] = after


def _mamba_step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: the state after it [heads, head_dim, state_size], and its output [heads, head_dim]."""
    step, x = softplus(dt.float()), x.float()
    B, C = (part.float().repeat_interleave(len(x) // len(part), dim=0)[:, None, :] for part in (B, C))
    state = state * (step * A).exp()[:, None, None] + (step[:, None] * x)[..., None] * B
    return state, (state * C).sum(-1) + x * D[:, None]


def fused_gdn_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """[1, num_tokens, heads] each: logarithms of decays, and strengths of writes."""
    return (-A_log.float().exp() * softplus(a.float() + dt_bias))[None], sigmoid(b.float())[None]


def chunk_gated_delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, Tensor]:
    """The gated delta rule for several requests, one after the other in ``v`` [1, num_tokens, heads, head_dim].

    Returns:
        Outputs, shaped as ``v``; None; states [1, n, heads, head_dim, key_dim] before each :data:`CHUNK`-th token of
        each request. ``initial_state`` [num_slots, ...] moves on.
    """
    out, chunks = torch.zeros_like(v), []
    for (start, end), slot in zip(pairwise(cu_seqlens.tolist()), initial_state_indices.tolist(), strict=True):
        state = initial_state[slot].clone().float()
        for t in range(start, end):
            if (t - start) % CHUNK == 0:
                chunks.append(state)
            state, out[0, t] = _delta_step(state, q[0, t], k[0, t], v[0, t], g[0, t], beta[0, t])
        initial_state[slot] = state
    return out, None, torch.stack(chunks)[None]


def fused_recurrent_gated_delta_rule_packed_decode(
    *,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    **_: Any,
) -> None:
    """The same for one token of each request, whose queries, keys and values lie side by side."""
    _, heads, head_dim, key_dim = initial_state.shape
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    for i, slot in enumerate(ssm_state_indices.tolist()):
        q, k = mixed_qkv[i, : -heads * head_dim].view(2, -1, key_dim)
        v = mixed_qkv[i, -heads * head_dim :].view(heads, head_dim)
        after, out[i, 0] = _delta_step(initial_state[slot].float(), q, k, v, g[0, i], beta[0, i])
        initial_state[slot] = after


def _delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token: the state after it [heads, head_dim, key_dim], and its output [heads, head_dim].

    A value is written over what the decayed state answers to its key.
    """
    q, k = (_unit(part.float()).repeat_interleave(len(v) // len(part), dim=0)[:, None, :] for part in (q, k))
    state = state * g.exp()[:, None, None]
    wrong = v.float() - (state * k).sum(-1)
    state = state + (beta[:, None] * wrong)[..., None] * k
    return state, (state * q).sum(-1) * q.shape[-1] ** -0.5


def _unit(rows: Tensor) -> Tensor:
    return rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def rms_norm_gated(norm: Any, x: Tensor, z: Tensor) -> Tensor:
    """[num_rows, head_dim]: rows of length 1, weighted, times ``silu(z)``; in place of a module's ``forward``."""
    scale = (x.float().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return (norm.weight * (x.float() * scale).to(x.dtype) * silu(z.float())).to(x.dtype)


def fused_sigmoid_mul(x: Tensor, gate: Tensor, **_: Any) -> Tensor:
    """``x`` times ``sigmoid(gate)``, shaped as ``x``."""
    return x * sigmoid(gate).reshape(x.shape)


def fused_gate_sigmoid_mul_add(x: Tensor, gate_weight: Tensor, shared: Tensor, out: Tensor) -> None:
    """Add ``shared`` [num_tokens, width], gated per token, to ``out``."""
    out += sigmoid(x @ gate_weight)[:, None] * shared


def track_mamba_states_if_needed(
    conv_states: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Copy the states of the requests whose snapshot is due; one layer's states, [num_slots, ...]."""
    due = mamba_track_mask.nonzero()[:, 0]
    for states in (conv_states, ssm_states):
        states[mamba_track_indices[due]] = states[cache_indices[due].long()]


def track_mamba_states_all_layers(conv_states: Tensor, ssm_states: Tensor, *indices: Any, **_: Any) -> None:
    """The same for all layers, [num_layers, num_slots, ...]."""
    for layer in range(len(conv_states)):
        track_mamba_states_if_needed(conv_states[layer], ssm_states[layer], *indices)
