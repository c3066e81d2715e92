from __future__ import annotations

import importlib.util
import re
import sys

import pytest
import torch

from sgl_kvevict.attention.backend import build_attention
from sgl_kvevict.attention.cpu.numba_attention import NumbaAttention
from sgl_kvevict.attention.cpu.torch_attention import TorchAttention
from sgl_kvevict.attention.flashinfer.prefill import find_plain_prefill
from sgl_kvevict.attention.kernel_facts import kernels_for
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.support import IMPLEMENTATION, KERNELS, reasons, require


def kernel_reasons(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, is_latent: bool = False
) -> list[str]:
    return reasons(KERNELS, kernels_for(name, device, dtype, head_dim, is_latent=is_latent))


def resolve_attention(name: str, device: str) -> str:
    facts = kernels_for(name, torch.device(device))
    require(IMPLEMENTATION, facts)
    return facts.chosen


def test_auto_follows_the_device():
    assert resolve_attention("auto", "cpu") == "numba"
    assert resolve_attention("auto", "cuda") == "triton"


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("triton", "cpu", "attention is 'triton', which runs on a CUDA device only; the device is 'cpu'"),
        ("flashinfer", "cpu", "attention is 'flashinfer', which runs on a CUDA device only"),
        ("torch", "cuda", r"attention is 'torch', which runs on the CPU only.*allowed: 'auto', 'triton', 'flashinfer'"),
        ("numba", "cuda", "attention is 'numba', which runs on the CPU only"),
        ("auto", "xpu", "the device is 'xpu'"),
    ],
)
def test_what_cannot_run_is_refused(name, device, message):
    with pytest.raises(UnsupportedSetupError, match=message):
        resolve_attention(name, device)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedSetupError, match="attention is 'flashinfer', but the package flashinfer is not"):
        resolve_attention("flashinfer", "cuda")


def test_what_is_asked_for_is_built(make_world):
    world = make_world()
    arenas = world.geometry, world.k, world.v
    assert isinstance(build_attention("auto", *arenas), NumbaAttention)
    assert isinstance(build_attention("numba", *arenas), NumbaAttention)
    assert isinstance(build_attention("torch", *arenas), TorchAttention)


def test_where_numba_cannot_run_torch_does_and_says_so(make_world, caplog):
    world = make_world(1, 1, 24)
    assert isinstance(build_attention("auto", world.geometry, world.k, world.v), TorchAttention)
    assert "attention is 'torch', which takes longer: the head dimension is 24" in caplog.text
    with pytest.raises(UnsupportedSetupError, match="attention is 'numba', but the head dimension is 24"):
        build_attention("numba", world.geometry, world.k, world.v)


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "message"),
    [
        ("auto", torch.float32, 128, "attention 'triton' needs bfloat16, float16 or fp8_e4m3 KV on a GPU; .* float32"),
        ("triton", torch.float8_e5m2, 128, r"float8_e5m2 \(start with --kv-cache-dtype auto\)"),
        ("triton", torch.bfloat16, 512, "needs a head_dim of at most 256; the model's is 512"),
        ("flashinfer", torch.bfloat16, 80, "needs a head_dim of 64, 128 or 256; the model's is 80"),
        ("flashinfer", torch.float8_e5m2, 64, "attention 'flashinfer' needs bfloat16 or float16 KV"),
    ],
)
def test_what_no_kernel_is_compiled_for_is_a_reason(name, dtype, head_dim, message):
    (reason,) = kernel_reasons(name, torch.device("cuda"), dtype, head_dim)
    assert re.search(message, reason)
    assert kernel_reasons(name, torch.device("cuda"), torch.float16, 128) == []


@pytest.mark.parametrize(
    ("name", "dtype", "width", "message"),
    [
        ("flashinfer", torch.bfloat16, 64, "the kernels that we call would read keys and values as rows of one width"),
        ("auto", torch.bfloat16, 577, "needs latents of at most 576 numbers, .* the model's have 577"),
        ("triton", torch.float8_e4m3fn, 576, "SGLang writes float8 ones without the layers' scales"),
    ],
)
def test_latents_that_no_gpu_kernel_reads(name, dtype, width, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    (reason,) = kernel_reasons(name, torch.device("cuda"), dtype, width, is_latent=True)
    assert re.search(message, reason)
    for device in ("cuda", "cpu"):
        assert kernel_reasons("auto", torch.device(device), torch.bfloat16, 576, is_latent=True) == []


@pytest.mark.usefixtures("flashinfer_is_chosen")
def test_flashinfer_is_not_built_for_latents():
    geometry = KVGeometry(1, 4, 1, 64, 8, latent_dim=48)
    k = torch.zeros(geometry.arena_shape)
    with pytest.raises(UnsupportedSetupError, match="'triton' reads them"):
        build_attention("flashinfer", geometry, k, k[..., :48])
    assert find_plain_prefill(geometry, k.bfloat16(), k[..., :48].bfloat16(), bool) is None


def test_the_cpu_takes_float32_and_no_float8():
    cpu = torch.device("cpu")
    assert kernel_reasons("auto", cpu, torch.float32, 80) == []
    (reason,) = kernel_reasons("auto", cpu, torch.float8_e4m3fn, 80)
    assert re.search(r"on a CPU needs .* KV; the pool's dtype is float8_e4m3fn", reason)


def test_float8_needs_a_gpu_that_converts_it(monkeypatch):
    capability = (8, 0)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    (reason,) = kernel_reasons("auto", torch.device("cuda"), torch.float8_e4m3fn, 128)
    assert re.search(r"fp8_e4m3 KV needs a GPU of compute capability 8.9 or newer .* this one's is 8.0", reason)
    capability = (8, 9)
    assert kernel_reasons("auto", torch.device("cuda"), torch.float8_e4m3fn, 128) == []


def test_a_numba_that_cannot_be_imported_is_named(monkeypatch):
    for module in [name for name in sys.modules if name.startswith("kvevict_kernels.span_attention.numba_")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert resolve_attention("auto", "cpu") == "torch"
    with pytest.raises(UnsupportedSetupError, match="attention is 'numba', but numba cannot be imported"):
        resolve_attention("numba", "cpu")


def test_without_openmp_torch_computes(monkeypatch):
    monkeypatch.setattr("kvevict_kernels.span_attention.call.torch_team", lambda: None)
    assert resolve_attention("auto", "cpu") == "torch"
    with pytest.raises(UnsupportedSetupError, match="PyTorch does not compute on OpenMP threads"):
        resolve_attention("numba", "cpu")
