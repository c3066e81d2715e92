"""``sgl-kvevict learn`` ends the server that it started, and says why one ended; with a stand-in for the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.fake_server import helper_pid, install, wait_gone
from sgl_kvevict.cli.learn import learn
from sgl_kvevict.errors import ConfigError

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """Start learning; temporary folders lie in ``folder``, and flags go to the stand-in."""
    path = os.pathsep.join([install(folder)["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    (folder / "config.json").write_text("{}")
    command = [sys.executable, "-c", "from sgl_kvevict.cli import main; main()", "learn", str(folder)]
    command += ["--out", str(folder / "scores.safetensors"), "--", "--device", "cpu", *flags]
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_learn_leaves_no_server(tmp_path: Path, how: signal.Signals) -> None:
    with start(tmp_path, "--never") as process:
        logs: list[Path] = []
        while not (logs and "config" in logs[0].read_text()):
            assert process.poll() is None
            time.sleep(0.05)
            logs = list(tmp_path.glob("kvevict-learn-*/server.log"))
        pid = helper_pid(logs[0].read_text())
        process.send_signal(how)
    assert process.returncode == (128 + how if how == signal.SIGTERM else -how)
    assert wait_gone(pid)
    assert bool(list(tmp_path.glob("kvevict-learn-*"))) is (how == signal.SIGKILL)  # the folder of the log


def test_only_a_file_that_is_there_can_be_completed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scores' cannot be read"):
        learn(str(tmp_path), tmp_path / "scores", None, [], lambda _: None, completes=True)
    assert not list(tmp_path.iterdir())


def test_a_server_that_exits_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with start(tmp_path, "--fail") as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert "error: the server exited with code 3" in errors and "refused: two reasons" in errors
