from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.event_sockets import wait_until
from helpers.fake_server import helper_pid, install, is_running
from kvevict_tools import launcher
from kvevict_tools.launcher import LaunchError, System, config_env, free_port, launch, launch_all


@pytest.fixture
def fake_env(tmp_path):
    return install(tmp_path)


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


@needs_proc
def test_a_server_answers_and_stops_with_its_children(tmp_path, fake_env):
    env = {**fake_env, **config_env({"budget": 1.0})}
    with launch("some/model", flags=["--x"], env=env, log_path=tmp_path / "logs" / "s.log") as server:
        assert server.alive
        assert server.get_json("/server_info") == {"path": "/server_info"}
        assert server.post("/generate", {"text": "hello"}) == b'{"text": "hello"}'
        assert '{"budget": 1.0}' in server.log()
        assert server.leak_messages() == []
        pid = helper_pid(server.log())
        assert is_running(pid)
    assert not server.alive
    wait_until(lambda: not is_running(pid))
    server.stop()  # a second time is harmless
    with pytest.raises(LaunchError, match="exited with code"):
        server.check_alive()


@needs_proc
def test_a_suspended_server_answers_only_after_it_is_continued(tmp_path, fake_env):
    """Its children are suspended too, and it can be stopped."""
    with launch("m", env=fake_env, log_path=tmp_path / "s.log") as server:
        pid = helper_pid(server.log())
        server.suspend()
        with pytest.raises(OSError, match="timed out"):
            server.get_json("/server_info", timeout_s=0.3)
        assert Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        server.resume()
        assert server.get_json("/server_info") == {"path": "/server_info"}
        server.suspend()
        server.stop(grace_s=60)
    assert server.process.returncode == -signal.SIGTERM  # continued, so that it could end by itself
    wait_until(lambda: not is_running(pid))


#: Launches a server and waits; the test kills it.
PARENT = """
import sys, time
from kvevict_tools.launcher import launch
server = launch("m", log_path=sys.argv[1])
if sys.argv[2] == "suspended":
    server.suspend()
print(server.process.pid, flush=True)
time.sleep(600)
"""


def obey_signals() -> None:
    """A shell starts jobs in the background with SIGINT ignored, nohup with SIGHUP: children inherit that."""
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_DFL)


@needs_proc
@pytest.mark.parametrize("state", ["running", "suspended"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_a_killed_process_leaves_no_server(tmp_path, fake_env, how, state):
    log_path = tmp_path / "s.log"
    path = os.pathsep.join([fake_env["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", PARENT, str(log_path), state]
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, preexec_fn=obey_signals) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()), helper_pid(log_path.read_text())]
        assert all(map(is_running, pids))
        parent.send_signal(how)
    wait_until(lambda: not any(map(is_running, pids)))


@needs_proc
def test_a_watcher_ends_with_its_group():
    leader = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    leader.wait()
    assert launcher.start_watcher(leader.pid).wait(120) == 0


@needs_proc
def test_a_group_of_zombies_has_ended():
    """What a server leaves behind is reaped by init, in some containers late or never."""
    leader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    assert not launcher._has_ended(leader.pid)
    launcher.end_group(leader.pid)
    os.killpg(leader.pid, 0)  # nobody has reaped it
    assert launcher._has_ended(leader.pid)
    leader.wait()
    assert launcher._has_ended(leader.pid)


@needs_proc
def test_a_server_that_exits_is_an_error_with_its_last_words(tmp_path, fake_env):
    log_path = tmp_path / "s.log"
    with pytest.raises(LaunchError, match=r"code 3\n[^$]*refused: two reasons"):
        launch("m", flags=["--fail"], env=fake_env, log_path=log_path)
    wait_until(lambda: not is_running(helper_pid(log_path.read_text())))


@needs_proc
def test_a_failure_is_explained_by_a_server_that_died(tmp_path, fake_env, monkeypatch):
    def fail(kill: bool) -> None:
        monkeypatch.setattr(launcher, "_DEATH_SETTLE_S", 120 if kill else 0.1)
        with launch("m", env=fake_env, log_path=tmp_path / "s.log") as server:
            if kill:
                server.process.kill()
            raise ConnectionResetError("reset by peer")

    with pytest.raises(LaunchError, match="exited with code -9") as caught:
        fail(kill=True)
    assert isinstance(caught.value.__context__, ConnectionResetError)
    with pytest.raises(ConnectionResetError):
        fail(kill=False)


@needs_proc
def test_a_server_that_never_gets_healthy_is_stopped(tmp_path, fake_env):
    log_path = tmp_path / "s.log"
    with pytest.raises(LaunchError, match="no answer within 10 s"):
        launch("m", flags=["--never"], env=fake_env, log_path=log_path, timeout_s=10)
    wait_until(lambda: not is_running(helper_pid(log_path.read_text())))


def test_complaints_of_the_memory_checker_are_found(tmp_path, fake_env):
    with launch("m", flags=["--leak"], env=fake_env, log_path=tmp_path / "s.log") as server:
        assert server.leak_messages() == ["ValueError: pool memory leak detected! [full] total=10"]


def test_a_port_is_given_once_and_only_when_it_is_free(monkeypatch):
    first = free_port()
    with socket.create_server(("127.0.0.1", first)):
        monkeypatch.setattr(launcher, "_ports_given", set())
        monkeypatch.setattr(launcher, "_PORTS", range(first, first + 3))
        ports = {free_port() for _ in range(2)}
        assert ports == {first + 1, first + 2}
        with pytest.raises(LaunchError, match=f"no free TCP port from {first} to {first + 2}"):
            free_port()


def test_ports_lie_below_those_of_outgoing_connections():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert free_port() < min(client.getsockname()[1], server.getsockname()[1])


def test_systems_run_side_by_side_and_end_together(fake_env, tmp_path):
    systems = [System("one", (), fake_env), System("the other", (), fake_env | config_env({"budget": 0.5}))]
    with launch_all("model", systems, log_folder=tmp_path, timeout_s=60) as fleet:
        assert list(fleet) == ["one", "the other"]
        assert all(server.get_json("/x") == {"path": "/x"} for server in fleet.values())
        assert '{"budget": 0.5}' in fleet["the other"].log()
        assert fleet["the other"].log_path == tmp_path / "the-other.log"
        pids = [helper_pid(server.log()) for server in fleet.values()]
    assert not any(server.alive for server in fleet.values())
    assert not any(map(is_running, pids))


def test_a_system_that_does_not_start_ends_the_others(fake_env, tmp_path):
    systems = [System("good", (), fake_env), System("bad", ("--fail",), fake_env)]
    with (
        pytest.raises(LaunchError, match="refused: two reasons"),
        launch_all("model", systems, log_folder=tmp_path, timeout_s=60),
    ):
        raise AssertionError("not all of them run")
    assert not is_running(helper_pid((tmp_path / "good.log").read_text()))
