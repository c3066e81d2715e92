"""Checks of a machine: judged from made-up facts, and read on the one at hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from helpers.command_line import COMPLETE, H100
from sgl_kvevict import machine as checks
from sgl_kvevict.machine import check_environment, check_machine, check_packages, read_machine


def test_a_complete_machine_needs_nothing():
    for device in ("cuda", "cpu"):
        lines = check_packages(COMPLETE) + check_environment(COMPLETE) + check_machine(COMPLETE, device)
        assert {(line.state, line.mend) for line in lines} == {("ok", "")}
    found = {line.name: line.found for line in check_machine(COMPLETE, "cuda")}
    assert found["GPU"] == "2 x NVIDIA H100 80GB HBM3, compute capability 9.0"
    assert found["shared memory"] == "227 KiB a program"


@pytest.mark.parametrize(
    ("device", "changed", "name", "state", "found", "mend"),
    [
        ("cuda", {"torch_cuda": None}, "torch", "missing", "2.14.1, built for a CPU", "CUDA 13"),
        ("cuda", {"gpus": ()}, "GPU", "missing", "torch sees none", "torch above"),
        ("cuda", {"gpus": (replace(H100, capability=(7, 5)),)}, "GPU", "missing", "7.5", "8.0"),
        ("cuda", {"gpus": (H100, replace(H100, free_gib=30.0))}, "free memory", "warning", "30.0 of 79.6", "end what"),
        ("cuda", {"packages": {"flashinfer-python": "0.7.2"}}, "Triton", "missing", "not installed", "pip install"),
        ("cuda", {"packages": {"triton": "3.8.0"}}, "FlashInfer", "warning", "not installed", "takes over"),
        (
            "cpu",
            {"cpu_flags": frozenset({"avx2"})},
            "processor",
            "warning",
            "AVX2",
            "--dtype float32 --kv-cache-dtype bf",
        ),
        ("cpu", {"numba_reason": "no numba"}, "numba", "warning", "no numba", "pip install numba"),
        ("cpu", {"host_gib": 1.5}, "memory", "warning", "1.5 GiB", "--max-total-tokens"),
    ],
)
def test_what_is_missing_is_named_with_its_mend(device, changed, name, state, found, mend):
    bad = {line.name: line for line in check_machine(replace(COMPLETE, **changed), device) if line.state != "ok"}
    assert bad[name].state == state
    assert found in bad[name].found and mend in bad[name].mend


def test_another_sglang_and_a_plugin_that_is_not_found():
    other = replace(COMPLETE, packages={"sglang": "0.5.24"}, plugins=frozenset())
    lines = [line for line in check_packages(other) + check_environment(other) if line.state != "ok"]
    assert [(line.name, line.state) for line in lines] == [("SGLang", "warning"), ("plugin", "missing")]
    assert "sglang==0.5.23" in lines[0].mend and "tested with" in lines[0].found


def test_float32_is_no_slower_without_avx512():
    plain = replace(COMPLETE, cpu_flags=frozenset({"avx2"}))
    assert {line.state for line in check_machine(plain, "cpu", "float32")} == {"ok"}


def test_a_pool_of_32_bits_is_noticed():
    (line,) = (line for line in check_machine(COMPLETE, "cpu", "float32", "float32") if line.state != "ok")
    assert (line.name, line.state, line.found) == ("KV rows", "warning", "float32")
    assert "--kv-cache-dtype bfloat16" in line.mend


def test_the_machine_at_hand():
    machine = read_machine()
    assert machine.packages["sglang"] == "0.5.23"
    assert machine.host_gib > 0
    assert all(line.state != "missing" for line in check_packages(machine) + check_machine(machine, "cpu"))


def test_neither_sglang_nor_torch_is_imported_at_the_top():
    code = "import sys, sgl_kvevict.machine; assert not {'torch', 'sglang', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("cpuinfo", "is_fast"),
    [
        ("model name\t: A\nflags\t\t: sse avx2 fma\n", False),
        ("model name\t: B\nflags\t\t: avx2 avx512bw avx512dq avx512vl\n", True),
        ("Features\t: asimd bf16\n", True),
        ("", True),
    ],
)
def test_float32_where_bfloat16_is_slow(monkeypatch, cpuinfo, is_fast):
    monkeypatch.setattr(checks, "_read", lambda _path: cpuinfo)
    assert checks.has_fast_bfloat16() is is_fast
