"""Run every kernel test on each implementation: CPU path, Triton interpreter, Triton on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers.poison import poisoned_allocations


@pytest.fixture(params=["cpu", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Device of the tensors of a call."""
    if request.param == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("Triton compiles for the device here; the cuda case covers it")
        monkeypatch.setattr("kvevict_kernels.dispatch.TRITON_DEVICES", ("cuda", "cpu"))
        return "cpu"
    return str(request.param)


@pytest.fixture
def interpreted(request: pytest.FixtureRequest, device: str) -> bool:
    """Whether Triton's interpreter runs the test."""
    return device == "cpu" and "interpreter" in request.node.callspec.id


@pytest.fixture
def triton_device() -> str:
    """Device for a test that calls a Triton implementation itself, once and not per implementation."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """Fill every fresh allocation of the test with NaN or the lowest integer."""
    with poisoned_allocations():
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(42)
