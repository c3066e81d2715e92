"""The tests' definitions of SGLang's kernels of recurrent layers, against these kernels in Triton's interpreter."""

from __future__ import annotations

import contextlib

import pytest
import torch
import triton.language as tl
from models.recurrent import kernels
from sglang.kernels.ops.attention.fla import chunk, fused_recurrent
from sglang.kernels.ops.mamba import causal_conv1d_triton, triton_ops
from sglang.kernels.ops.mamba.triton_ops import mamba_ssm
from sglang.srt.layers.attention.mamba.mamba2_metadata import Mamba2Metadata
from triton.runtime.autotuner import Autotuner

pytestmark = pytest.mark.sglang

STARTS = torch.tensor([0, 100, 160], dtype=torch.int32)
SLOTS = torch.tensor([2, 1], dtype=torch.int32)
WITH_EXP = ("op", "cumsum", "chunk_delta_h", "chunk_o", "fused_recurrent", "wy_fast")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    """No device to enter, no configuration to measure, and functions that the interpreter finds."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch.cpu, "device", lambda index: contextlib.nullcontext(), raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(
        Autotuner, "run", lambda tuner, *args, **kw: tuner.fn.run(*args, **kw, **tuner.configs[0].all_kwargs())
    )
    for module in WITH_EXP:
        name = f"sglang.kernels.ops.attention.fla.{module}.exp"
        monkeypatch.setattr(name, lambda x: tl.exp(x), raising=False)


def assert_same(*pairs):
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_convolutions():
    weight, bias, states = torch.randn(32, 4), torch.randn(32), torch.randn(4, 32, 3)
    known = {"cache_indices": SLOTS, "query_start_loc": STARTS, "has_initial_state": torch.tensor([True, False])}
    results = []
    prompts, tokens = torch.randn(160, 32).T, torch.randn(2, 32)
    for place in (kernels, causal_conv1d_triton):
        own = states.clone()
        prefilled = place.causal_conv1d_fn(
            prompts, weight, bias, conv_states=own, activation="silu", seq_lens_cpu=[100, 60], **known
        )
        decoded = place.causal_conv1d_update(tokens.clone(), own, weight, bias, "silu", conv_state_indices=SLOTS)
        results.append((prefilled, decoded, own))
    assert_same(*zip(*results, strict=True))


def test_gated_delta_rule():
    """Outputs, states after each request, and states before each 64th token."""
    num_keys, num_values, width, count = 1, 3, 64, 160
    q, k, v = (torch.randn(1, count, heads, width) for heads in (num_keys, num_keys, num_values))
    g, beta, states = (
        -torch.rand(1, count, num_values),
        torch.rand(1, count, num_values),
        torch.randn(4, 3, width, width),
    )
    own, theirs = states.clone(), states.clone()
    out, _, chunks = kernels.chunk_gated_delta_rule(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=own, initial_state_indices=SLOTS, cu_seqlens=STARTS
    )
    expected, their_chunks = chunk.ChunkGatedDeltaRuleFunction.apply(
        q, k, v, g, beta, width**-0.5, theirs, SLOTS, STARTS, True, True
    )
    assert_same((out, expected), (own, theirs), (chunks, their_chunks))


def test_gated_delta_rule_of_one_token():
    heads, width = 3, 64
    known = {"mixed_qkv": torch.randn(2, 2 * width + heads * width), "a": torch.randn(2, heads)}
    known |= {"b": torch.randn(2, heads), "A_log": torch.randn(heads), "dt_bias": torch.randn(heads)}
    known |= {"scale": width**-0.5, "use_qk_l2norm_in_kernel": True, "ssm_state_indices": SLOTS}
    states, results = torch.randn(4, heads, width, width), []
    for place in (kernels, fused_recurrent):
        own, out = states.clone(), torch.empty(2, 1, heads, width)
        place.fused_recurrent_gated_delta_rule_packed_decode(initial_state=own, out=out, **known)
        results.append((out, own))
    assert_same(*zip(*results, strict=True))


def test_scan():
    """Outputs, states on the grid of all tokens, states after each request, and one at a request's 64th token."""
    heads, width, size, count = 4, 16, 16, 160
    x, dt = torch.randn(1, count, heads, width), torch.randn(1, count, heads)
    B, C = torch.randn(1, count, 1, size), torch.randn(1, count, 1, size)
    known = {"chunk_size": 64, "D": torch.randn(heads), "dt_bias": torch.randn(heads), "cu_seqlens": STARTS}
    known |= {"initial_states": torch.randn(2, heads, width, size), "track_seq_idx": torch.tensor([0])}
    known |= {"track_end_locs": torch.tensor([80])}
    A, own, out = -torch.rand(heads), torch.empty_like(x), torch.empty_like(x)
    got = kernels.mamba_chunk_scan_combined(x, dt, A, B, C, out=own, **known)
    places, offsets = Mamba2Metadata._query_start_loc_to_chunk_indices_offsets(STARTS, 64, count)
    known |= {"seq_idx": torch.tensor([[0] * 100 + [1] * 60], dtype=torch.int32), "chunk_indices": places}
    known |= {"chunk_offsets": offsets, "dt_softplus": True, "state_dtype": torch.float32}
    known |= {"return_varlen_states": True, "return_track_states": True}
    expected = triton_ops.mamba_chunk_scan_combined(x, dt, A, B, C, out=out, **known)
    assert_same((own, out), *zip(got, expected, strict=True))


def test_scan_of_one_token():
    heads, width, size = 4, 16, 16
    A, D, dt_bias = (torch.randn(heads) for _ in range(3))
    rows = {"A": -A.exp()[:, None, None].expand(heads, width, size), "D": D[:, None].expand(heads, width)}
    rows |= {"x": torch.randn(2, heads, width), "dt": torch.randn(2, heads)[..., None].expand(2, heads, width)}
    rows |= {"B": torch.randn(2, 1, size), "C": torch.randn(2, 1, size)}
    known = {"dt_bias": dt_bias[:, None].expand(heads, width), "state_batch_indices": SLOTS, "dt_softplus": True}
    states, results = torch.randn(4, heads, width, size), []
    for place in (kernels, mamba_ssm):
        own, out = states.clone(), torch.empty(2, heads, width)
        place.selective_state_update(own, **rows, out=out, z=None, **known)
        results.append((out, own))
    assert_same(*zip(*results, strict=True))
