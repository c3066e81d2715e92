"""``sgl-kvevict warm`` and the client function behind it, against a server that answers as SGLang does."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sgl_kvevict.cli import main
from sgl_kvevict.client import API_KEY_VAR, WarmError, warm
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.request import ticket_digest


class FakeServer(ThreadingHTTPServer):
    """Records requests; the scoring of a prefix takes ``polls`` looks at the state."""

    polls = 2
    outcome: str | None = "compressed"
    is_ours = True
    is_forgetful = False
    refusal: str | None = None
    status = 400

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def state(self) -> dict[str, Any]:
        """``/server_info``: outcomes by request, queued at first."""
        body = self.seen[0][1]
        options = body.get("sampling_params", body)["custom_params"]["kvevict"]
        digest = ticket_digest(options["ticket"])
        self.polls -= 1
        outcomes = {} if self.is_forgetful else {digest: "queued" if self.polls > 0 else self.outcome}
        told = {} if self.outcome is None else {"warm_outcomes": outcomes}
        return {"internal_states": [{"kvevict": told} if self.is_ours else {}]}


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self._answer(self.server.state())

    def do_POST(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        if self.server.refusal is not None:
            self._answer({"error": self.server.refusal}, self.server.status)
        elif self.path == "/generate":
            self._answer({"text": "", "meta_info": {"prompt_tokens": 1234}})
        else:
            self._answer({"usage": {"prompt_tokens": 77}})

    def _answer(self, value: dict[str, Any], status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def test_a_text_is_cached_and_awaited(server: FakeServer) -> None:
    warmed = warm(server.url, text="a long prefix")
    assert (warmed.tokens, warmed.outcome) == (1234, "compressed")
    ((path, body),) = server.seen
    assert path == "/generate" and body["text"] == "a long prefix"
    assert body["sampling_params"]["max_new_tokens"] == 0
    options = body["sampling_params"]["custom_params"]["kvevict"]
    assert options["warm"] and len(options) == 2 and len(options["ticket"]) >= 32


def test_messages_go_through_the_chat_template_and_questions_along(server: FakeServer) -> None:
    messages = [{"role": "system", "content": "x"}]
    assert warm(server.url, messages=messages, questions=["who?", "why?"]).tokens == 77
    ((path, body),) = server.seen
    assert path == "/v1/chat/completions" and body["messages"] == messages
    assert body["custom_params"]["kvevict"]["questions"] == ["who?", "why?"]


def test_a_policy_without_passes_has_nothing_to_wait_for(server: FakeServer) -> None:
    server.outcome = None
    assert warm(server.url, input_ids=[1, 2, 3]).outcome == "cached"


def test_an_outcome_that_the_server_has_forgotten_is_unknown(server: FakeServer) -> None:
    server.is_forgetful = True
    assert warm(server.url, input_ids=[1, 2, 3]).outcome == "unknown"


def test_refusals_silence_and_patience_are_named(server: FakeServer) -> None:
    with pytest.raises(ValueError, match="exactly one of text, input_ids and messages"):
        warm(server.url, text="a", input_ids=[1])
    server.polls = 10**9
    with pytest.raises(WarmError, match=r"still being scored after 0\.2 s"):
        warm(server.url, text="a", timeout=0.2)
    server.refusal = "custom_params['kvevict']: unknown field 'wram'"
    with pytest.raises(WarmError, match=r"status 400.*wram"):
        warm(server.url, text="a")
    with pytest.raises(WarmError, match=r"http://127\.0\.0\.1:1/generate") as caught:
        warm("http://127.0.0.1:1", text="a")
    assert str(caught.value).endswith("no connection (Connection refused); is a server running there?")
    server.refusal, server.is_ours = None, False
    with pytest.raises(WarmError, match=r"runs without sgl-kvevict \(--radix-cache-backend kvevict\)"):
        warm(server.url, text="a")


def test_command_line(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, questions = tmp_path / "prefix.txt", tmp_path / "questions.txt"
    text.write_text("a long prefix")
    questions.write_text("who?\n\nwhy?\n")
    arguments = ["warm", server.url, "--text-file", str(text), "--questions-file", str(questions), "--json"]
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    printed = json.loads(capsys.readouterr().out)
    assert printed["tokens"] == 1234 and printed["outcome"] == "compressed"
    assert server.seen[0][1]["sampling_params"]["custom_params"]["kvevict"]["questions"] == ["who?", "why?"]


def test_command_line_wants_one_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["warm", "http://127.0.0.1:1"])
    assert "--text-file and --messages-file: give one of them" in capsys.readouterr().err


def test_the_port_of_something_else_is_said_without_its_bytes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"\xff\x00\x1b[2J not HTTP\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WarmError, match="/generate: the answer is not HTTP; is this the port of SGLang's server"):
            warm(f"http://127.0.0.1:{other.getsockname()[1]}", text="A prefix.")
        thread.join()


def test_the_address_of_openai_s_clients_is_corrected(server: FakeServer) -> None:
    server.refusal, server.status = "Not Found", 404
    with pytest.raises(WarmError, match=r"status 404: .*; allowed as url: http://HOST:PORT, without /v1"):
        warm(f"{server.url}/v1", text="A prefix.")


def test_a_key_is_sent_with_every_request(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(API_KEY_VAR, raising=False)
    warm(server.url, text="a")
    assert set(server.keys) == {None}
    server.keys.clear()
    monkeypatch.setenv(API_KEY_VAR, "from-the-environment")
    warm(server.url, text="a")
    assert set(server.keys) == {"Bearer from-the-environment"}
    server.keys.clear()
    (tmp_path / "key").write_text("from-a-file\n")
    (tmp_path / "prefix").write_text("a long prefix")
    with pytest.raises(SystemExit, match="0"):
        main(["warm", server.url, "--text-file", str(tmp_path / "prefix"), "--api-key-file", str(tmp_path / "key")])
    assert set(server.keys) == {"Bearer from-a-file"}
    assert "from-a-file" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("key", ["sec ret", "sec\nret", "secret\u20ac"])
def test_no_error_shows_a_key(server: FakeServer, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="api_key: allowed: printable ASCII without spaces") as caught:
        warm(server.url, text="a", api_key=key)
    assert "sec" not in str(caught.value) and caught.value.__cause__ is None
    server.refusal, server.status = "Unauthorized", 401
    monkeypatch.setenv(API_KEY_VAR, "verysecret")
    with pytest.raises(WarmError, match=r"status 401: .*Unauthorized.*; the key of the server's --api-key") as refused:
        warm(server.url, text="a")
    assert "verysecret" not in str(refused.value)
