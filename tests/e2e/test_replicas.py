"""Two replicas behind SGLang's gateway, with one store: real processes, and one of them is killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from helpers.e2e_env import ENV
from helpers.event_sockets import wait_until
from helpers.tiny_model import VOCAB_SIZE
from kvevict_tools import launcher
from kvevict_tools.launcher import free_port

SMG = shutil.which("smg")
pytestmark = pytest.mark.skipif(SMG is None, reason="needs the package smg")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "replicas" / "run.py"
FLAGS = ("--skip-tokenizer-init", "--max-total-tokens", "4000", "--context-length", "2048")
CONFIG = {"policy": "snapkv", "min_prefix_tokens": 48, "tail_tokens": 16, "policy_options": {"window_size": 16}}
START_S = 600.0


def post(url: str, tokens: list[int], count: int = 8) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = json.dumps({"input_ids": tokens, "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def state_of(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/server_info", timeout=30) as response:
        return json.loads(response.read())["internal_states"][0]["kvevict"]


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def first_of_free_ports(count: int) -> int:
    """The first of so many ports in a row that nothing listens on."""
    while not all(map(launcher._can_bind, range(first := free_port(), first + count))):
        pass
    return first


@pytest.fixture
def fleet(tiny_llama, tmp_path):
    """The example: the gateway's address, and the replicas'."""
    port = first_of_free_ports(4)
    command = [sys.executable, str(EXAMPLE), "--model", str(tiny_llama), "--store", str(tmp_path / "store")]
    command += ["--port", str(port), "--config", json.dumps(CONFIG), "--logs", str(tmp_path / "logs"), "--", *FLAGS]
    with (tmp_path / "out").open("wb") as out:
        example = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **ENV}, start_new_session=True)
    try:
        said = tmp_path / "out"
        wait_until(lambda: "gateway http" in said.read_text() or example.poll() is not None, START_S)
        assert example.poll() is None, said.read_text() + (tmp_path / "logs" / "replica-0.log").read_text()[-3000:]
        gateway = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_up(gateway), START_S)
        yield gateway, [f"http://127.0.0.1:{port + 1 + number}" for number in range(2)]
    finally:
        example.send_signal(signal.SIGTERM)
        try:
            example.wait(60)
        finally:
            if example.poll() is None:
                os.killpg(example.pid, signal.SIGKILL)
    assert example.returncode == 0


def group_of(url: str) -> int:
    """Process group of the server that listens at an address."""
    port = int(url.rsplit(":", 1)[1])
    listens = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    (server,) = {each.pid for each in listens if each.laddr.port == port}
    return os.getpgid(server)


def test_what_one_replica_made_all_find_and_one_may_die(fleet):
    gateway, replicas = fleet
    rng = random.Random(5)
    documents = [[rng.randrange(3, VOCAB_SIZE) for _ in range(500)] for _ in range(4)]
    questions = [[*document, *(rng.randrange(3, VOCAB_SIZE) for _ in range(9))] for document in documents]
    for document in documents:
        post(replicas[0], document, 1)  # warmed on the first
    wait_until(lambda: state_of(replicas[0])["stored_segments"] == len(documents), START_S)
    expected = [post(replicas[0], question)["output_ids"] for question in questions]
    for question, answer in zip(questions, expected, strict=True):  # found by the second
        reply = post(replicas[1], question)
        assert reply["output_ids"] == answer and reply["meta_info"]["cached_tokens"] >= 484
    assert state_of(replicas[1])["loaded_segments"] == len(documents)

    failed, served, stopped = [], [], threading.Event()

    def traffic(number: int) -> None:
        while not stopped.is_set():
            which = number % len(questions)
            began = time.monotonic()
            try:
                assert post(gateway, questions[which])["output_ids"] == expected[which]
                served.append(began)
            except (urllib.error.URLError, OSError) as error:
                failed.append((began, error))
            number += 1

    clients = [threading.Thread(target=traffic, args=(number,), daemon=True) for number in range(3)]
    for client in clients:
        client.start()
    try:
        wait_until(lambda: len(served) >= 10, START_S)
        killed = time.monotonic()
        os.killpg(group_of(replicas[0]), signal.SIGKILL)
        wait_until(lambda: sum(began > killed for began in served) >= 10, START_S)
        wait_until(lambda: is_up(replicas[0]), START_S)
    finally:
        stopped.set()
    for client in clients:
        client.join()
    assert [error for began, error in failed if began > killed] == []  # only those in flight, if any
    assert len(failed) <= len(clients)
    for question, answer in zip(questions, expected, strict=True):
        reply = post(replicas[0], question)
        assert reply["output_ids"] == answer and reply["meta_info"]["cached_tokens"] >= 484
    state = state_of(replicas[0])
    assert state["loaded_segments"] == len(documents) and state["stored_segments"] == 0  # nothing was computed again
