"""At the start of a server: what its machine lacks is a refusal, or a warning if a server may do without."""

from __future__ import annotations

import pytest
import torch

from sgl_kvevict.machine import Gpu, Machine
from sgl_kvevict.sglang_adapter import model_facts
from sgl_kvevict.support import MACHINE, reasons

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
