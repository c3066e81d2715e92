"""Take the picture of ``sgl-kvevict top --web`` in docs/operations.md: the page during the demo, in headless Chromium.

Run: python tools/docs/page_picture.py (needs the demo model, and Debian's package chromium).
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from websockets.sync.client import ClientConnection, connect

from kvevict_tools.launcher import free_port, kvevict_system, launch
from kvevict_tools.models import made_model
from sgl_kvevict.cli.web import WebServer

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "results" / "top-web.png"
WINDOW = "1200,2200"  # higher than the page
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
FLAGS = (*FLAGS, "--disable-background-networking", "--disable-component-update")
SELECT = """
(async () => {
  const later = (ms) => new Promise((done) => setTimeout(done, ms));
  await later(3000);
  const handbook = [...nodes.values()].filter((node) => node.tokens > 256).sort((a, b) => b.hits - a.hits)[0];
  document.querySelector(`#icicle button[data-node="${handbook.id}"]`).click();
  while ($("text").hidden) await later(200);
  const end = Math.ceil($("text").getBoundingClientRect().bottom) + 20;
  return { width: document.documentElement.clientWidth, height: end };
})()
"""
"""Selects the demo's document, waits until its text is shown, and returns the part of the page down to there, without
the place of its scroll bar."""

sys.path.insert(0, str(ROOT / "examples" / "demo"))


class Page:
    """A page in a browser that is driven over its debugging port."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._num_asked = socket, 0

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command of the DevTools protocol."""
        self._num_asked += 1
        self._socket.send(json.dumps({"id": self._num_asked, "method": method, "params": parameters}))
        while (reply := json.loads(self._socket.recv(60))).get("id") != self._num_asked:
            pass
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        result: dict[str, Any] = reply["result"]
        return result

    def evaluate(self, code: str) -> Any:
        """Return what a promise of the page gives."""
        return self.ask("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)["result"]["value"]


@contextmanager
def opened(url: str) -> Iterator[Page]:
    """Open a page in a browser of its own."""
    with tempfile.TemporaryDirectory() as profile:
        port = free_port()
        command = ["chromium", *FLAGS, f"--window-size={WINDOW}", f"--user-data-dir={profile}"]
        command += [f"--remote-debugging-port={port}", url]
        browser = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            with connect(_debugger(port), max_size=None) as socket:
                yield Page(socket)
        finally:
            os.killpg(browser.pid, signal.SIGTERM)
            browser.wait()
            time.sleep(1)  # its children leave the profile's folder


def _debugger(port: int) -> str:
    for _ in range(100):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as reply:
                return next(str(tab["webSocketDebuggerUrl"]) for tab in json.load(reply) if tab["type"] == "page")
        except (OSError, StopIteration):
            time.sleep(0.1)
    raise TimeoutError("chromium did not open its debugging port within 10 s")


def main() -> None:
    """Run the demo beside the page, select its document, and write the picture."""
    import run as demo
    from kvevict_demo.ask import ask

    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/events"
        config = {"events": {"endpoint": endpoint, "expose_tokens": True}}
        flags = ("--max-total-tokens", str(demo.POOL_SLOTS), "--random-seed", "42")
        system = kvevict_system("page", config, flags)
        log = ROOT / "out" / "page_picture.log"
        with (
            launch(made_model("demo"), flags=system.flags, env=system.env, log_path=log) as server,
            WebServer(endpoint, 0, 1.0, 30.0) as web,
        ):
            threading.Thread(target=web.serve_forever, daemon=True).start()
            with opened(f"http://127.0.0.1:{web.server_port}/") as page:
                demo.run(server, Console(file=io.StringIO()), 0.2, demo.POOL_SLOTS)
                for num_days in (60, 60, 8):  # compressed as usual, and too short to be compressed
                    ask(server.url, demo.log_text(num_days), demo.Streamed(demo.LOG_QUESTION))
                area = {"x": 0, "y": 0, "scale": 1, **page.evaluate(SELECT)}
                picture = page.ask("Page.captureScreenshot", format="png", clip=area)["data"]
            web.shutdown()
    PICTURE.write_bytes(base64.b64decode(picture))


if __name__ == "__main__":
    main()
