"""The process that starts a server refuses setups before it starts others."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvevict.config import ENV_VAR
from sgl_kvevict.errors import ConfigError, UnsupportedSetupError
from sgl_kvevict.sglang_adapter import resolution, start_facts
from sgl_kvevict.sglang_adapter.plugin import register

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
