"""What only the layers of a model or its machine show is refused before the server takes requests, or a warning."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from torch import nn

from helpers.settings import refused
from kvevict_kernels.device_limits import DeviceLimits
from sgl_kvevict.geometry import UNSCALED, KVScales
from sgl_kvevict.machine import Gpu, Machine
from sgl_kvevict.policies.by_name import build_policy
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.sglang_adapter import model_facts
from sgl_kvevict.sglang_adapter.model_facts import layer_traits, pooling_of
from sgl_kvevict.sglang_adapter.model_parts import find_kv_scales, find_rotary, find_sink_dtype, find_windows
from sgl_kvevict.support import MACHINE, reasons

PLACES = {0: 0, 1: 1, 2: 2}


def model(**variant: object) -> nn.Module:
    """Two plain layers and a third one."""
    layers = [RadixAttention(4, 16, 0.25, 2, layer_id=i) for i in range(3)]
    for name, value in variant.items():
        setattr(layers[2], name, value)
    return nn.Sequential(*layers)


def test_scales_of_fp8_are_the_layers() -> None:
    """As SGLang has read them; 1 where a layer has none."""
    assert find_kv_scales(model(), PLACES) is UNSCALED
    assert find_kv_scales(model(k_scale_float=1.0, v_scale_float=1.0), PLACES) is UNSCALED
    assert find_kv_scales(model(k_scale_float=0.25), PLACES) == KVScales(k=(1.0, 1.0, 0.25), v=(1.0, 1.0, 1.0))


def test_a_pool_too_wide_for_the_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where rows are pooled one by one on a GPU with little shared memory."""

    def policy_reasons(policy: Policy | None, head_dim: int, device: torch.device) -> list[str]:
        return refused(policy=policy, head_dim=head_dim, pooling=pooling_of(policy, head_dim, device))

    policy = build_policy("snapkv", {"kernel_size": 127})
    cuda, small, large = torch.device("cuda"), DeviceLimits(89, 142, 102400), DeviceLimits(90, 132, 233472)
    monkeypatch.setattr(model_facts, "limits_of", lambda device: small)
    (reason,) = policy_reasons(policy, 256, cuda)
    assert reason.startswith("kernel_size is 127; with a head_dim of 256 this GPU's shared memory allows at most 95")
    assert policy_reasons(policy, 128, cuda) == policy_reasons(policy, 256, torch.device("cpu")) == []
    assert policy_reasons(build_policy("snapkv", {"kernel_size": 95}), 256, cuda) == []
    assert policy_reasons(build_policy("snapkv", {"kernel_size": 127, "pooling": "avg"}), 256, cuda) == []
    monkeypatch.setattr(model_facts, "limits_of", lambda device: large)
    assert policy_reasons(policy, 256, cuda) == []


def layer_reasons(model: nn.Module) -> list[str]:
    return refused(traits=layer_traits(model))


def test_windows_are_the_layers() -> None:
    """SGLang counts the keys beside a query's own, and leaves -1 where there is no window."""
    assert find_windows(model(), PLACES) == ()
    windowed = model(sliding_window_size=127)
    assert find_windows(windowed, PLACES) == (0, 0, 128)
    assert find_windows(windowed, {1: 0}) == ()  # the others have another pool
    assert find_windows(windowed, {2: 0, 0: 1}) == (128, 0)
    assert layer_reasons(windowed) == []


def test_sink_logits_lie_beside_the_attention() -> None:
    """As in gpt-oss; what else is called so is not meant."""
    layer = nn.Module()
    layer.attention = RadixAttention(4, 16, 0.25, 2, layer_id=0)
    layer.sinks = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    assert find_sink_dtype(nn.Sequential(model(), layer)) == torch.bfloat16
    elsewhere = nn.Module()
    elsewhere.sinks = layer.sinks
    assert find_sink_dtype(nn.Sequential(model(), elsewhere)) is None


def table(value: float) -> nn.Module:
    """A rotary embedding as SGLang's."""
    module = nn.Module()
    module.register_buffer("cos_sin_cache", torch.full((10, 8), value))
    module.is_neox_style = True
    return module


def attention(layer: int, rotary: nn.Module | None, window: int = -1, **attributes: object) -> nn.Module:
    module = nn.Module()
    module.attention = RadixAttention(4, 16, 0.25, 2, layer_id=layer, sliding_window_size=window)
    module.rotary_emb = rotary
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_the_rotary_embedding_is_that_of_layers_without_a_window() -> None:
    """Gemma 3 has another one for windows."""
    ours, other = table(1.0), table(2.0)
    found = find_rotary(nn.Sequential(attention(0, other, 7), attention(1, ours), attention(2, ours)), PLACES)
    assert torch.equal(found.cos_sin, ours.cos_sin_cache) and found.is_neox
    beside_the_layers = nn.Sequential(other, attention(0, None), attention(1, None))
    assert torch.equal(find_rotary(beside_the_layers, PLACES).cos_sin, other.cos_sin_cache)
    elsewhere = nn.Sequential(attention(0, ours), attention(5, other))  # no layer of the pool
    assert torch.equal(find_rotary(elsewhere, PLACES).cos_sin, ours.cos_sin_cache)
    assert find_rotary(nn.Sequential(attention(0, ours), attention(1, other)), PLACES) is None
    assert find_rotary(model(), PLACES) is None


@pytest.mark.parametrize(
    "says", [{"force_rope": False}, {"apply_rope_all_layers": False}, {"v2": True}, {"sliding_window_pattern": "LG"}]
)
def test_nothing_is_turned_where_only_windows_have_positions(says: dict[str, object]) -> None:
    rotary = table(1.0)
    found = find_rotary(nn.Sequential(attention(0, rotary, 7, **says), attention(1, rotary, **says)), PLACES)
    keys = torch.randn(3, 2, 16)
    assert torch.equal(found.apply(keys, torch.tensor([1, 5, 9])), keys)
    turned = {name: not value for name, value in says.items()}
    assert find_rotary(nn.Sequential(attention(1, rotary, **turned)), PLACES).cos_sin.shape == (10, 8)
    assert find_rotary(nn.Sequential(attention(0, rotary, **says), attention(1, rotary, **turned)), PLACES) is None


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ({"logit_cap": 30.0}, "a layer caps its attention logits"),
        ({"is_cross_attention": True}, "a layer's attention is not causal self-attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "a layer's attention is not causal self-attention"),
    ],
)
def test_a_variant_in_one_layer_is_named(variant: dict[str, object], reason: str) -> None:
    (found,) = layer_reasons(model(**variant))
    assert found.startswith(reason)


BARE = Machine(
    packages={"triton": "3.8.0", "flashinfer-python": "0.7.2"},
    torch_cuda="13.0",
    gpus=(Gpu("NVIDIA T4", (7, 5), 64, 1.0, 15.0),),
)


def machine_reasons(device: torch.device, dtype: torch.dtype) -> list[str]:
    checks = model_facts.machine_of(device, dtype, torch.bfloat16)
    return [reason for check in checks for reason in reasons(MACHINE, check)]


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(model_facts, "read_machine", lambda devices: asked.append(devices) or BARE)
    (reason,) = machine_reasons(torch.device("cuda", 0), torch.bfloat16)
    assert "compute capability 7.5" in reason and "8.0 (Ampere) or newer" in reason
    assert asked == [[0]]


def test_a_cpu_is_never_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(cpu_flags=frozenset({"avx2"}), numba_reason="numba cannot be imported")
    monkeypatch.setattr(model_facts, "read_machine", lambda devices: machine)
    assert machine_reasons(torch.device("cpu"), torch.float32) == []
    assert "numba cannot be imported (attention 'torch' takes over" in caplog.text
    assert "processor" not in caplog.text and "memory" not in caplog.text
    assert machine_reasons(torch.device("cpu"), torch.bfloat16) == []
    assert "--dtype float32" in caplog.text
