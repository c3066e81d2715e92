"""The configuration of the event socket, and the way it takes through the command line."""

from __future__ import annotations

import json

import pytest

from helpers.command_line import run
from sgl_kvevict.config import ENV_VAR, EventsConfig, KVEvictConfig, load_config, parse_config
from sgl_kvevict.errors import ConfigError


def test_off_unless_asked_for_and_then_on_loopback():
    assert KVEvictConfig().events is None
    events = load_config({ENV_VAR: '{"events": {}}'}).events
    assert events == EventsConfig() and not events.expose_tokens
    assert events.endpoint.rsplit(":", 1)[0] == "tcp://127.0.0.1"


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:1", "tcp://*:5657", "tcp://[::1]:5657", "tcp://gpu-7.local:65535", "ipc:///tmp/x"]
)
def test_addresses(address):
    assert parse_config({"events": {"endpoint": address}}, "test").events.endpoint == address


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "tcp://127.0.0.1"),
        ("endpoint", "127.0.0.1:5657"),
        ("endpoint", "tcp://a b:1"),
        ("endpoint", 5657),
        ("endpoint", None),
        ("endpoint", "tcp://127.0.0.1:0"),
        ("endpoint", "tcp://127.0.0.1:65536"),
        ("expose_tokens", "yes"),
        ("unknown", 1),
    ],
)
def test_bad_fields_are_named_with_value_and_what_is_allowed(field, value):
    with pytest.raises(ConfigError) as caught:
        parse_config({"events": {field: value}, "budget": 7.5}, "test")
    message = str(caught.value)
    assert f"events.{field}: " in message and json.dumps(value) in message and "allowed: " in message
    assert "budget: got 7.5" in message  # all at once


def test_events_must_be_an_object():
    with pytest.raises(ConfigError, match=r"events: got true; allowed: null \(off\), or an object"):
        parse_config({"events": True}, "test")


def served_events(capsys, *arguments: str) -> dict | None:
    code, line, _ = run(capsys, "serve", "some/model", "--dry-run", *arguments, "--", "--device", "cpu")
    assert code == 0
    return json.loads(line.split(f"{ENV_VAR}='")[1].split("'")[0]).get("events")


def test_serve_passes_them_on(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv(ENV_VAR, raising=False)
    assert served_events(capsys) is None
    assert served_events(capsys, "--events") == {}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"events": {"endpoint": "ipc:///tmp/x"}}))
    expected = {"endpoint": "ipc:///tmp/x"}
    assert served_events(capsys, "--config", str(file)) == expected
    assert served_events(capsys, "--config", str(file), "--events") == expected  # the file's details stay
