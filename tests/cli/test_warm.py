"""``sgl-kvevict warm`` and the client function behind it, against a server that answers as SGLang does."""

from __future__ import annotations

import json
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from helpers.command_line import run
from helpers.web_servers import QuietHandler, serving
from sgl_kvevict.client import API_KEY_VAR, WarmError, warm
from sgl_kvevict.errors import ConfigError


class FakeServer(ThreadingHTTPServer):
    """Records requests, and answers with what it had cached."""

    refusal: str | None = None
    status = 400

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        details = {"device": 1000, "host": 50, "kvevict_compressed": 9}
        self.meta_info: dict[str, Any] = {"prompt_tokens": 1234, "cached_tokens_details": details}
        self.seen: list[tuple[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(QuietHandler):
    server: FakeServer

    def do_POST(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        if self.server.refusal is not None:
            self.answer(json.dumps({"error": self.server.refusal}).encode(), self.server.status)
        else:
            value = {"meta_info": self.server.meta_info}
            self.answer(json.dumps(value if self.path == "/generate" else {"choices": [value]}).encode())


@pytest.fixture
def server():
    with serving(FakeServer()) as fake:
        yield fake


def test_a_text_is_one_request_without_an_answer(server):
    report = warm(server.url, text="a long prefix")
    assert (report.device, report.host, report.storage, report.compressed.num_tokens) == (1000, 50, 0, 9)
    assert server.seen == [("/generate", {"text": "a long prefix", "sampling_params": {"max_new_tokens": 0}})]


def test_messages_go_through_the_chat_template(server):
    messages = [{"role": "system", "content": "x"}]
    assert warm(server.url, messages=messages).device == 1000
    ((path, body),) = server.seen
    assert path == "/v1/chat/completions" and body["messages"] == messages
    assert body["max_tokens"] == 1 and body["return_meta_info"]


def test_refusals_and_silence_are_named(server):
    with pytest.raises(ValueError, match="exactly one of text, input_ids and messages"):
        warm(server.url, text="a", input_ids=[1])
    server.meta_info = {}
    for given in ({"text": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        with pytest.raises(WarmError, match="not an answer of SGLang"):
            warm(server.url, **given)
    server.refusal = "the prompt is too long"
    with pytest.raises(WarmError, match=r"status 400.*too long"):
        warm(server.url, text="a")
    with pytest.raises(WarmError, match=r"http://127\.0\.0\.1:1/generate") as caught:
        warm("http://127.0.0.1:1", text="a")
    assert str(caught.value).endswith("no connection (Connection refused); is a server running there?")


def test_command_line(server, tmp_path, capsys):
    text = tmp_path / "prefix.txt"
    text.write_text("a long prefix")
    arguments = ("warm", server.url, "--text-file", str(text))
    (code, line, _), (code_of_json, as_json, _) = run(capsys, *arguments), run(capsys, *arguments, "--json")
    assert code == code_of_json == 0
    assert "1,000 in the pool, 50 in the host's memory, 0 in the store" in line
    assert json.loads(as_json)["device"] == 1000 and server.seen[0][1]["text"] == "a long prefix"


def test_the_address_of_openai_s_clients_is_corrected(server):
    server.refusal, server.status = "Not Found", 404
    with pytest.raises(WarmError, match=r"status 404: .*; allowed as url: http://HOST:PORT, without /v1"):
        warm(f"{server.url}/v1", text="A prefix.")


def test_a_key_is_sent_with_every_request(server, tmp_path, monkeypatch, capsys):
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
    arguments = ("--text-file", str(tmp_path / "prefix"), "--api-key-file", str(tmp_path / "key"))
    code, out, error = run(capsys, "warm", server.url, *arguments)
    assert code == 0 and set(server.keys) == {"Bearer from-a-file"}
    assert "from-a-file" not in out + error


@pytest.mark.parametrize("key", ["sec ret", "sec\nret", "secret\u20ac"])
def test_no_error_shows_a_key(server, key, monkeypatch):
    with pytest.raises(ConfigError, match="api_key: allowed: printable ASCII without spaces") as caught:
        warm(server.url, text="a", api_key=key)
    assert "sec" not in str(caught.value) and caught.value.__cause__ is None
    server.refusal, server.status = "Unauthorized", 401
    monkeypatch.setenv(API_KEY_VAR, "verysecret")
    with pytest.raises(WarmError, match=r"status 401: .*Unauthorized.*; the key of the server's --api-key") as refused:
        warm(server.url, text="a")
    assert "verysecret" not in str(refused.value)
