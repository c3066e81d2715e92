"""``sgl-kvevict check``: one screen, or JSON; the exit code says whether a server could start."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sgl_kvevict.cli import main
from sgl_kvevict.machine import Gpu, Machine

GPU_MACHINE = Machine(
    packages={"sglang": "0.5.23", "torch": "2.14.1", "triton": "3.8.0", "flashinfer-python": "0.7.2"},
    plugins=frozenset({"kvevict", "kvevict_cpu"}),
    host_gib=60.0,
    torch_cuda="13.0",
    gpus=(Gpu("NVIDIA H100", (9, 0), 227, 79.0, 79.6),),
    home="/home/somebody",
    cache="/home/somebody/.cache/sglang",
)


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, machine: Machine, *arguments: str
) -> tuple[object, str]:
    monkeypatch.setattr("sgl_kvevict.machine.read_machine", lambda: machine)
    with pytest.raises(SystemExit) as caught:
        main(["check", *arguments])
    return caught.value.code, capsys.readouterr().out


def test_both_paths_are_shown_and_the_gpu_counts_where_there_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = run(capsys, monkeypatch, GPU_MACHINE)
    assert code == 0
    assert "GPU: a server could start" in out and "CPU: a server could start" in out
    assert len(out.splitlines()) <= 40  # one screen
    code, out = run(capsys, monkeypatch, replace(GPU_MACHINE, torch_cuda=None))
    assert code == 1
    assert "GPU: a server could not start" in out and "CPU: a server could start" in out
    missing = next(line for line in out.splitlines() if line.startswith("  missing"))
    assert "torch" in missing and "built for a CPU" in missing
    assert "-> install torch for CUDA 13" in out


def test_a_machine_without_a_gpu_is_judged_as_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = replace(GPU_MACHINE, gpus=(), torch_cuda=None)
    assert run(capsys, monkeypatch, plain)[0] == 0
    code, out = run(capsys, monkeypatch, plain, "--device", "cuda")
    assert code == 1
    assert "CPU:" not in out


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"home": None}, "home           this user has no home folder"),
        (
            {"cache_error": "denied"},
            "cache          /home/somebody/.cache/sglang cannot be written (denied)",
        ),
        ({"excluded_by": "SGLANG_PLUGINS=x"}, "plugin         SGLANG_PLUGINS=x leaves it out"),
        ({"plugins": frozenset()}, "plugin         SGLang does not find it"),
    ],
)
def test_an_environment_in_which_sglang_ends_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, changed: dict[str, object], line: str
) -> None:
    code, out = run(capsys, monkeypatch, replace(GPU_MACHINE, **changed), "--device", "cpu")
    assert code == 1 and "CPU: a server could not start" in out and f"  missing  {line}" in out


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = run(capsys, monkeypatch, replace(GPU_MACHINE, torch_cuda=None), "--json")
    answer = json.loads(out)
    assert code == 1
    assert (answer["device"], answer["can_start"]) == ("cuda", False)
    assert [line["name"] for line in answer["checks"]["cuda"] if line["state"] == "missing"] == ["torch"]
