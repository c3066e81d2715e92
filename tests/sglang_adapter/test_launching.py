"""The process that starts a server refuses setups, files and ports before it starts others or loads anything."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sgl_kvevict.config import ENV_VAR, KVEvictConfig
from sgl_kvevict.errors import ConfigError, UnsupportedSetupError
from sgl_kvevict.sglang_adapter import resolution, start_facts
from sgl_kvevict.sglang_adapter.plugin import register
from sgl_kvevict.sglang_adapter.start_facts import before_load
from sgl_kvevict.support import RESOURCES, SETTINGS, BeforeLoad
from sgl_kvevict.support import reasons as reasons_of

OURS = {"radix_cache_backend": "kvevict", "attention_backend": "kvevict"}


class Arguments(SimpleNamespace):
    """Arguments of a server; None for all that are not given."""

    def __getattr__(self, name: str) -> Any:
        return None


def start(monkeypatch, program: str, config: dict[str, Any], **arguments: Any) -> list[object]:
    """Run the first step of a start; returns what was resolved."""
    resolved: list[object] = []
    monkeypatch.setattr("sys.argv", [program])
    monkeypatch.setenv(ENV_VAR, json.dumps(config))
    monkeypatch.setattr(start_facts, "bind_error", lambda host, port: "taken")
    resolution.after_first_step(Arguments(**arguments), resolved.append)
    return resolved


@pytest.mark.parametrize("program", ["/x/sglang/launch_server.py", "/bin/sglang"])
def test_a_program_of_sglang_ends_with_the_reasons(monkeypatch, program):
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, program, {}, **OURS, page_size=16, host="127.0.0.1", port=30000)
    assert str(ended.value) == (
        "sgl-kvevict: error: sgl-kvevict cannot serve this setup:\n"
        "  - --page-size is 16, only 1 is supported: spans are packed into single token slots\n"
        "  - --port: 30000 on 127.0.0.1 cannot be bound (taken); allowed: a free port"
    )


def test_any_other_program_gets_the_error_and_its_port_is_not_asked_for(monkeypatch):
    with pytest.raises(UnsupportedSetupError, match=r"--max-total-tokens: got 10; allowed: an integer >= 256"):
        start(monkeypatch, "program.py", {}, **OURS, max_total_tokens=10)
    with pytest.raises(ConfigError, match="got 'snapvk'"):
        start(monkeypatch, "program.py", {"policy": "snapvk"}, **OURS)
    assert len(start(monkeypatch, "program.py", {}, **OURS, port=30000)) == 1


def test_only_one_of_the_two_backends(monkeypatch):
    with pytest.raises(UnsupportedSetupError, match="start with --attention-backend kvevict"):
        start(monkeypatch, "program.py", {}, radix_cache_backend="kvevict")
    with pytest.raises(UnsupportedSetupError, match="needs the matching --radix-cache-backend kvevict"):
        start(monkeypatch, "program.py", {}, attention_backend="kvevict")


def test_a_server_without_our_backends_is_left_alone(monkeypatch):
    (arguments,) = start(monkeypatch, "/bin/sglang", {"nonsense": 1}, page_size=16, port=30000)
    assert arguments.page_size == 16


@pytest.mark.parametrize(
    "flag", ["attention-backend kvevict", "radix-cache-backend=kvevict", "attention-backend triton"]
)
def test_a_plugin_that_cannot_be_loaded_ends_the_command_that_asks_for_it_and_no_other(monkeypatch, flag):
    def fails() -> None:
        raise RuntimeError("Could not determine\nhome directory.")

    monkeypatch.setattr("sgl_kvevict.sglang_adapter.compat.require_supported_sglang", fails)
    monkeypatch.setattr("sys.argv", ["/bin/sglang", "serve", *f"--{flag}".split()])
    with pytest.raises(SystemExit if "kvevict" in flag else RuntimeError) as ended:
        register()  # SGLang logs a RuntimeError, and goes on
    says = "sgl-kvevict: error: SGLang cannot load this plugin: RuntimeError: Could not determine home directory."
    assert "kvevict" not in flag or str(ended.value) == says


def reasons(address=None, flags=None, **fields: Any) -> list[str]:
    return reasons_of(RESOURCES, before_load((flags or {}).get, KVEvictConfig(**fields), address=address))


@pytest.fixture
def taken_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("/etc/hostname", "store: '/etc/hostname' cannot be made or written (/etc/hostname is not a folder)"),
        ("/etc/hostname/x", "cannot be made or written"),
        ("/proc/x", "store: '/proc/x' cannot be made or written"),
        ("ftpx://host/x", "store: got 'ftpx://host/x'"),
    ],
)
def test_a_store_that_cannot_be_written_is_refused(store, message):
    (reason,) = reasons(store=store)
    assert message in reason and "\n" not in reason


def test_a_store_that_can_be_made_is_not_made_yet(tmp_path):
    assert reasons(store=str(tmp_path / "a" / "b")) == reasons(store="memory://x") == []
    assert list(tmp_path.iterdir()) == []


def test_files_of_scores(tmp_path):
    assert reasons(score_weights=str(tmp_path / "new" / "scores")) == []  # they are learned, and written there
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    (reason,) = reasons(score_weights=str(tmp_path / "other.safetensors"))
    assert "got format None; allowed: 'sgl-kvevict score weights 3'" in reason
    (reason,) = reasons(score_weights=str(tmp_path))
    assert reason.startswith("score_weights: score weights ") and "cannot be read" in reason
    for path in ("/proc/x/scores", "/etc/hostname/scores"):
        (reason,) = reasons(score_weights=path)
        assert reason.startswith("score_weights: ") and "cannot be written" in reason


def test_texts_to_learn_from(tmp_path):
    (reason,) = reasons(score_texts=str(tmp_path / "none"))
    assert reason.endswith("allowed: an existing folder, or null")
    (reason,) = reasons(score_texts=str(tmp_path))
    assert reason.startswith("score_texts: got 0 passages of 2,000 characters or more")


def test_ports_that_are_taken(taken_port, tmp_path):
    (reason,) = reasons(("127.0.0.1", taken_port))
    assert reason == f"--port: {taken_port} on 127.0.0.1 cannot be bound (Address already in use); allowed: a free port"
    assert reasons(("", taken_port)) and reasons(("0.0.0.0", taken_port))
    assert reasons(("127.0.0.1", "x")) == ["--port: got 'x'; allowed: 1 to 65535"]
    assert reasons(("127.0.0.1", 70000)) == ["--port: got 70000; allowed: 1 to 65535"]
    (reason,) = reasons(events={"endpoint": f"tcp://*:{taken_port}"})
    assert reason.startswith(f"events.endpoint: 'tcp://*:{taken_port}' cannot be bound (Address already in use)")
    (reason,) = reasons(events={"endpoint": "ipc:///etc/hostname/x"})
    assert "is not a folder" in reason
    assert reasons(events={"endpoint": f"ipc://{tmp_path}/x"}) == []


def test_a_pool_holds_at_least_one_prompt_that_is_compressed():
    config = {"min_prefix_tokens": 100, "tail_tokens": 10}
    assert reasons(**config) == reasons(flags={"max_total_tokens": "100"}, **config) == []
    for wrong in (99, "99", "x", ""):
        (reason,) = reasons(flags={"max_total_tokens": wrong}, **config)
        assert reason.startswith(f"--max-total-tokens: got {wrong!r}; allowed: an integer >= 100")


def test_the_checks_import_neither_sglang_nor_torch():
    source = Path(start_facts.__file__).read_text()
    assert "import torch" not in source and "import sglang" not in source and "from sglang" not in source


def speculation(config=None, **flags):
    return reasons_of(SETTINGS, BeforeLoad((OURS | flags).get, config or KVEvictConfig()))


def test_algorithms_that_speculate():
    for algorithm in (None, "NGRAM", "ngram", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN"):
        assert speculation(speculative_algorithm=algorithm) == []
    assert speculation(speculative_algorithm="STANDALONE", speculative_draft_attention_backend="kvevict") == []
    for algorithm in ("DFLASH", "FROZEN_KV_MTP"):  # SGLang makes the latter of NEXTN for Gemma 4's drafts
        (reason,) = speculation(speculative_algorithm=algorithm)
        allowed = "only 'NGRAM', 'STANDALONE', 'EAGLE', 'EAGLE3', 'NEXTN' are supported"
        assert f"--speculative-algorithm is {algorithm!r}, {allowed}: its drafts read KV of compressed tokens" in reason
