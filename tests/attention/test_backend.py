from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from sgl_kvevict.attention import CpuAttention, build_attention, resolve_attention
from sgl_kvevict.errors import UnsupportedSetupError

if TYPE_CHECKING:
    from conftest import MakeWorld


def test_auto_follows_the_device() -> None:
    assert resolve_attention("auto", "cpu") == "torch"
    assert resolve_attention("auto", "cuda") == "triton"


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("triton", "cpu", "attention is 'triton', which runs on a CUDA device only; the device is 'cpu'"),
        ("flashinfer", "cpu", "attention is 'flashinfer', which runs on a CUDA device only"),
        ("torch", "cuda", r"attention is 'torch', which runs on the CPU only.*allowed: 'auto', 'triton', 'flashinfer'"),
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


def test_cpu_arenas_get_torch(make_world: MakeWorld) -> None:
    world = make_world()
    assert isinstance(build_attention("auto", world.geometry, world.k, world.v), CpuAttention)
