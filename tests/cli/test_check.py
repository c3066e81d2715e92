"""``sgl-kvevict check``: one screen, or JSON; the exit code says whether a server could start."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from helpers.command_line import COMPLETE
from sgl_kvevict.cli import main
from sgl_kvevict.machine import Machine


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, machine: Machine, *arguments: str
) -> tuple[object, str]:
    monkeypatch.setattr("sgl_kvevict.machine.read_machine", lambda: machine)
    with pytest.raises(SystemExit) as caught:
        main(["check", *arguments])
    return caught.value.code, capsys.readouterr().out


def test_both_paths_are_shown_and_the_gpu_counts_where_there_is_one(capsys, monkeypatch):
    code, out = run(capsys, monkeypatch, COMPLETE)
    assert code == 0
    assert "GPU: a server could start" in out and "CPU: a server could start" in out
    assert len(out.splitlines()) <= 40  # one screen
    code, out = run(capsys, monkeypatch, replace(COMPLETE, torch_cuda=None))
    assert code == 1
    assert "GPU: a server could not start" in out and "CPU: a server could start" in out
    missing = next(line for line in out.splitlines() if line.startswith("  missing"))
    assert "torch" in missing and "built for a CPU" in missing
    assert "-> install torch for CUDA 13" in out


def test_a_machine_without_a_gpu_is_judged_as_a_cpu(capsys, monkeypatch):
    plain = replace(COMPLETE, gpus=(), torch_cuda=None)
    assert run(capsys, monkeypatch, plain)[0] == 0
    code, out = run(capsys, monkeypatch, plain, "--device", "cuda")
    assert code == 1
    assert "CPU:" not in out


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"home": None}, "home           this user has no home folder"),
        ({"cache_error": "denied"}, "cache          /home/somebody/.cache/sglang cannot be written (denied)"),
        ({"excluded_by": "SGLANG_PLUGINS=x"}, "plugin         SGLANG_PLUGINS=x leaves it out"),
        ({"plugins": frozenset()}, "plugin         SGLang does not find it"),
    ],
)
def test_an_environment_in_which_sglang_ends_is_named(capsys, monkeypatch, changed, line):
    code, out = run(capsys, monkeypatch, replace(COMPLETE, **changed), "--device", "cpu")
    assert code == 1 and "CPU: a server could not start" in out and f"  missing  {line}" in out


def test_json(capsys, monkeypatch):
    code, out = run(capsys, monkeypatch, replace(COMPLETE, torch_cuda=None), "--json")
    answer = json.loads(out)
    assert code == 1
    assert (answer["device"], answer["can_start"]) == ("cuda", False)
    assert [line["name"] for line in answer["checks"]["cuda"] if line["state"] == "missing"] == ["torch"]
