from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

import pytest

from sgl_kvevict.attention import CpuAttention, build_attention, resolve_attention
from sgl_kvevict.attention.numba_attention import NumbaAttention
from sgl_kvevict.errors import UnsupportedSetupError

if TYPE_CHECKING:
    from conftest import MakeWorld


def test_auto_follows_the_device() -> None:
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
def test_what_cannot_run_is_refused(name: str, device: str, message: str) -> None:
    with pytest.raises(UnsupportedSetupError, match=message):
        resolve_attention(name, device)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedSetupError, match="attention is 'flashinfer', but the package flashinfer is not"):
        resolve_attention("flashinfer", "cuda")


def test_what_is_asked_for_is_built(make_world: MakeWorld) -> None:
    world = make_world()
    arenas = world.geometry, world.k, world.v
    assert isinstance(build_attention("auto", *arenas), NumbaAttention)
    assert isinstance(build_attention("numba", *arenas), NumbaAttention)
    assert isinstance(build_attention("torch", *arenas), CpuAttention)


def test_where_numba_cannot_run_torch_does_and_says_so(make_world: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    world = make_world(1, 1, 24)
    assert isinstance(build_attention("auto", world.geometry, world.k, world.v), CpuAttention)
    assert "attention is 'torch', which takes longer: the head dimension is 24" in caplog.text
    with pytest.raises(UnsupportedSetupError, match="attention is 'numba', but the head dimension is 24"):
        build_attention("numba", world.geometry, world.k, world.v)


def test_a_numba_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("kvevict_kernels.span_attention.numba_")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert resolve_attention("auto", "cpu") == "torch"
    with pytest.raises(UnsupportedSetupError, match="attention is 'numba', but numba cannot be imported"):
        resolve_attention("numba", "cpu")


def test_without_openmp_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvevict_kernels.span_attention.call.torch_team", lambda: None)
    assert resolve_attention("auto", "cpu") == "torch"
    with pytest.raises(UnsupportedSetupError, match="PyTorch does not compute on OpenMP threads"):
        resolve_attention("numba", "cpu")
