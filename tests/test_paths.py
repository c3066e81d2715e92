"""Paths with ``~``, and users without a home folder: an error that says so, at every place where a path is named."""

from __future__ import annotations

import json
import pwd

import pytest

from helpers.command_line import run
from sgl_kvevict.config import ENV_VAR, parse_config
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.paths import cache_folder, expanded, write_error

STRANGER = "~nosuchuser/x"
WHY = "got \"~nosuchuser/x\", but user 'nosuchuser' has no home folder; allowed: a path without ~"


@pytest.fixture
def homeless(monkeypatch):
    """A user whom the system does not know, as in a container that runs with any uid."""

    def unknown(uid: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that ends with code 2 says."""
    code, _, error = run(capsys, *arguments)
    assert code == 2
    return error


def test_home_is_replaced_once_where_the_configuration_is_read(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    values = {"store": "~/store", "score_weights": "~/scores", "score_texts": "~/texts"}
    config = parse_config(values, "a test")
    assert (config.store, config.score_weights, config.score_texts) == (
        *("/home/somebody/store", "/home/somebody/scores", "/home/somebody/texts"),
    )
    assert parse_config({"store": "s3://bucket/~x"}, "a test").store == "s3://bucket/~x"
    assert parse_config({"store": "a/~b"}, "a test").store == "a/~b"


@pytest.mark.parametrize("field", ["store", "score_weights", "score_texts"])
def test_a_field_with_an_unknown_user_is_named(field):
    with pytest.raises(ConfigError) as caught:
        parse_config({field: STRANGER}, "a test")
    assert str(caught.value) == f"invalid configuration in a test:\n  - {field}: {WHY}"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("model", ["serve", STRANGER]),
        ("model", ["size", "--model", STRANGER, "--prefix-tokens", "10", "--pool-tokens", "99"]),
        ("STORE", ["store", "ls", STRANGER]),
    ],
)
def test_an_argument_with_an_unknown_user_is_named(capsys, name, arguments):
    assert error_of(capsys, *arguments) == f"sgl-kvevict: error: {name}: {WHY}\n"


def test_a_user_without_a_home_gets_a_reason(homeless, capsys, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"STORE: got \"~/x\", but this user \(uid \d+\) has no home folder"):
        expanded("~/x", "STORE")
    assert "the user's cache: got" in error_of(capsys, "serve", "demo", "--dry-run")  # looked up there
    (tmp_path / "config.json").write_text("{}")
    said = error_of(capsys, "serve", str(tmp_path), "--dry-run")
    assert "home: this user has no home folder (set HOME to a folder)" in said and "score_weights: " in said
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("models") == tmp_path / "sgl-kvevict" / "models"
    monkeypatch.setenv(ENV_VAR, json.dumps({"score_weights": None}))
    assert "score_weights" not in error_of(capsys, "serve", str(tmp_path), "--dry-run")


def test_a_folder_that_cannot_be_written_says_why(tmp_path):
    (tmp_path / "file").touch()
    assert write_error(tmp_path / "new" / "folder") is None and not (tmp_path / "new").exists()
    assert write_error(tmp_path / "file" / "x") == f"{tmp_path / 'file'} is not a folder"
