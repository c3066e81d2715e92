"""Errors of the first ten minutes say what is wrong, what is allowed and what to do (see cli/test_errors.py too)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ERRORS = {
    "demo/run.py --model nope": "demo: model: got 'nope', no such folder; allowed: a folder,",
    "demo/compare.py --model nope": "compare: model: got 'nope', no such folder; allowed: ",
    "demo/run.py --budget 0": "'--budget': Input should be greater than or equal to 0.1",
    "demo/run.py --pool-slots 100": "'--pool-slots': Input should be greater than or equal to 3300",
    "demo/run.py --bugdet 0.1": "No such option: --bugdet",
    "chat.py http://127.0.0.1:1": "no server answers (<urlopen error [Errno 111] Connection refused>); start one in ",
    "rag.py nonsense": "nonsense: no server answers (unknown url type: 'nonsense/health'); start one in ",
}


@pytest.mark.parametrize("line", ERRORS)
def test_a_wrong_command_line_is_told_in_a_few_lines(line: str) -> None:
    name, *arguments = line.split()
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / name), *arguments]
    environment = os.environ | {"COLUMNS": "160", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode in (1, 2) and done.stdout == ""
    assert ERRORS[line] in done.stderr and "Traceback" not in done.stderr and done.stderr.count("\n") < 12


def test_setup_without_the_right_python_names_it(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "requirements").mkdir()
    for name in ("torch.txt", "cpu.txt", "dev.txt"):
        (tmp_path / "requirements" / name).touch()
    (tmp_path / "pyproject.toml").touch()
    script = shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    environment = os.environ | {"PYTHON": "python9.9"}
    done = subprocess.run(["bash", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "need Python 3.11" in done.stderr and "not found as: python9.9" in done.stderr
