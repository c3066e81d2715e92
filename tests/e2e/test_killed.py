"""``sgl-kvevict learn`` is killed while its server runs: all processes of the server end, too.

``tests/tools/test_launcher.py`` has other signals and ends, with a stand-in for the server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def stat(pid: int) -> list[str]:
    """State, parent, process group, ... of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def running(group: int) -> list[int]:
    """Processes of a group that are more than zombies."""
    fields = {int(path.name): stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    return [pid for pid, values in fields.items() if values and values[0] != "Z" and int(values[2]) == group]


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_a_killed_learn_leaves_no_server(tmp_path: Path, demo_model: Path) -> None:
    code = "from sgl_kvevict.cli import main; main()"
    command = [sys.executable, "-c", code, "learn", str(demo_model), "--out", str(tmp_path / "scores.safetensors")]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL) as learn:

        def leaders() -> list[int]:
            """Children of `learn` that lead groups of several processes: its server, with scheduler and detokenizer."""
            pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
            children = [pid for pid in pids if stat(pid)[1:2] == [str(learn.pid)]]
            return [pid for pid in children if len(running(pid)) >= 3]

        wait_for(lambda: leaders() or learn.poll() is not None, "no server was started")
        (group,) = leaders()
        learn.kill()
    assert learn.returncode == -signal.SIGKILL
    wait_for(lambda: not running(group), f"still running: {running(group)}")
