"""``sgl-kvevict top --web``: its answers, what it refuses, and the live page in a real browser."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.command_line import run
from helpers.event_sockets import ipc_config
from helpers.harness import DOCUMENT
from helpers.watched import WatchedHarness
from helpers.web_servers import serving
from sgl_kvevict.cli import inspect as inspection
from sgl_kvevict.cli import web as web_module
from sgl_kvevict.cli.web import MAX_CONNECTIONS, WebServer

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


pytestmark = pytest.mark.usefixtures("server_args")


@pytest.fixture
def web(tmp_path, request, monkeypatch):
    """A page on a watched tree; the test's parameter: whether tokens are exposed, and whether requests go on."""
    exposed, has_traffic = getattr(request, "param", (True, False))
    monkeypatch.setattr(inspection, "load_decoder", lambda _: lambda ids: [f"<w{token}> " for token in ids])
    with WatchedHarness(ipc_config(tmp_path, expose_tokens=exposed)) as watched:
        harness = watched.harness
        namespace = None if has_traffic else "tenant"
        harness.finish(harness.run(DOCUMENT, namespace))
        harness.finish(harness.run(DOCUMENT[:20] + [9] * 30, namespace))
        harness.finish(harness.run([*DOCUMENT, 1, 2, 3], namespace))
        watched.keep_turning(with_traffic=has_traffic)
        with serving(WebServer(watched.service.config.endpoint, 0, 1.0, 20.0)) as server:
            yield server


def get(
    server: WebServer, path: str, method: str = "GET", host: str | None = "localhost", site: str = "same-origin"
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host)
    connection.putheader("Sec-Fetch-Site", site)
    connection.endheaders()
    reply = connection.getresponse()
    return reply.status, reply.read()


def nodes(server: WebServer) -> list[dict]:
    status, body = get(server, "/tree")
    assert status == 200
    return json.loads(body)["nodes"]


def test_the_page_the_tree_and_a_node(web):
    status, page = get(web, "/")
    assert status == 200 and b"INTERVAL_S = 1.0;" in page and b"@INTERVAL@" not in page
    root = next(node for node in nodes(web) if node["start"] == 0)
    assert root["tokens"] == 20 and root["compressed"] and root["hits"] >= 2 and root["namespace"] == "tenant"
    status, body = get(web, f"/node/{root['id']}", host=f"127.0.0.1:{web.server_port}")
    found = json.loads(body)
    assert status == 200 and found["tokens"] == [f"<w{token}> " for token in DOCUMENT[:20]]
    assert (found["map"]["start"], found["map"]["end"], found["map"]["num_bins"]) == (0, 20, 20)
    leaf = next(node for node in nodes(web) if not node["compressed"])
    found = json.loads(get(web, f"/node/{leaf['id']}")[1])
    assert found["map"] is None and len(found["tokens"]) == leaf["tokens"]
    assert json.loads(get(web, "/node/987654321")[1]) == {"map": None, "tokens": None}  # it has left the tree


@pytest.mark.parametrize("web", [(False, False)], indirect=True)
def test_no_token_leaves_a_server_that_exposes_none(web):
    for node in nodes(web):
        assert node["namespace"] is None
        for path in ("node", "text"):
            assert json.loads(get(web, f"/{path}/{node['id']}")[1])["tokens"] is None


def test_other_hosts_methods_and_paths_are_refused(web):
    assert web.server_address[0] == "127.0.0.1"
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::1]", None):
        for path in ("/", "/tree", "/node/1"):
            assert get(web, path, host=host)[0] == 403, host
    for site, status in {"cross-site": 403, "same-site": 403, "none": 200}.items():
        assert get(web, "/tree", site=site)[0] == status  # a page of another site, and an address that was typed
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"):
        assert get(web, "/tree", method)[0] == 501
    paths = ["/..", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/node/../tree", "/node/", "/node/-1", "/text/1/"]
    for path in [*paths, "/tree?x=1", "/tree/", "/node/" + "9" * 40, "/node/1%00", "*"]:
        status, body = get(web, path)
        assert status == 404 and b"root:" not in body, path


def test_a_broken_request_ends_its_own_connection_only(web):
    for junk in (b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a" * 70_000):
        with socket.create_connection(("127.0.0.1", web.server_port), timeout=60) as connection:
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
    assert get(web, "/tree")[0] == 200


def test_connections_are_bounded_in_number(web):
    with ExitStack() as stack:
        address = ("127.0.0.1", web.server_port)
        for _ in range(MAX_CONNECTIONS):
            connection = stack.enter_context(socket.create_connection(address, timeout=20))
            connection.sendall(b"GET /tree HTTP/1.1\r\nHost: local")
        with pytest.raises(ConnectionError):
            get(web, "/tree")
    deadline = time.monotonic() + 20
    while True:
        try:
            assert get(web, "/tree")[0] == 200
            break
        except ConnectionError:  # their threads are about to end
            assert time.monotonic() < deadline


def test_a_client_that_is_silent_loses_its_connection(web, monkeypatch):
    monkeypatch.setattr(web_module._Handler, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", web.server_port), timeout=20) as connection:
        connection.sendall(b"GET /tree HTTP/1.1\r\nHost: local")
        assert connection.recv(1) == b""


def test_a_silent_server_is_named(tmp_path):
    with serving(WebServer(f"ipc://{tmp_path}/nobody", 0, 1.0, 0.1)) as server:
        for path in ("/tree", "/node/1"):
            status, body = get(server, path)
            assert status == 502 and "no answer from ipc://" in json.loads(body)["error"]


def test_a_port_that_is_taken_and_options_that_do_not_go_together(capsys, web):
    for arguments, reason in (
        (["--web", str(web.server_port)], f"error: --web: got {web.server_port}: Address already in use; allowed: "),
        (["--web", "0", "--json"], "error: --web: got --json or --count too; allowed: neither"),
        (["nowhere", "--web", "0"], "error: endpoint: got 'nowhere'; allowed: "),
    ):
        code, _, error = run(capsys, "top", *arguments)
        assert code == 2 and reason in error


PROBE = Path(__file__).with_name("page_probe.js")


@pytest.mark.slow
@pytest.mark.parametrize("web", [(True, True)], indirect=True)
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian package chromium)")
def test_the_live_page_in_a_browser(web, tmp_path, monkeypatch):
    plain, script = inspection.page, f"<script>{PROBE.read_text()}</script>"
    monkeypatch.setattr(inspection, "page", lambda seconds: plain(seconds).replace("</body>", script + "</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=120000"]
    flags += ["--window-size=390,900"]  # a telephone's
    command = [CHROMIUM, *flags, "--dump-dom", f"http://127.0.0.1:{web.server_port}/"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    result = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">"))
    assert result["words"].startswith("".join(f"<w{token}> " for token in DOCUMENT[:20])[:40])
    assert min(result["shades"]) < 0.9 and int(result["later"]) > int(result["first"]) and result["silent"]
    assert re.fullmatch(
        r"the last \d+ s: slots, 0 % of prompt tokens found, \d+ compressions, \d+ nodes dropped", result["history"]
    )
    assert min(result["marked"]) >= 20
    assert result["keys"] == [True] * 5
    label, count, height, width = result["folded"]
    assert (label, count) == ("193 more", 9) and height >= 16 and width >= 24
    assert result["unfolded"][0] == 201 and result["unfolded"][1] >= 16 and not result["sideways"]
    assert re.fullmatch(r"Since the start 0 % of [\d,]+ tokens of [\d,]+ prompts were found; .*", result["found"])
