"""A Prometheus that scrapes one server every second, with the alert rules of the examples.

It reads the text format through a relay: prometheus_client 0.26 writes ``kvevict_spans`` for ``kvevict:spans`` in the
OpenMetrics format, which Prometheus below 3 prefers, and Debian's is too old for ``scrape_protocols``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from helpers.event_sockets import wait_until
from helpers.web_servers import QuietHandler
from kvevict_tools.launcher import free_port

PROMETHEUS = shutil.which("prometheus")
RULES = Path(__file__).resolve().parents[2] / "examples" / "monitoring" / "alerts.yml"


class Relay(ThreadingHTTPServer):
    """Gives on what ``url`` answers to a client that names no format."""

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = url


class _Handler(QuietHandler):
    server: Relay

    def do_GET(self) -> None:
        with urllib.request.urlopen(self.server.url, timeout=30) as reply:
            self.answer(reply.read())


class Prometheus:
    """Runs until closed; ``url`` is that of a server, without ``/metrics``."""

    def __init__(self, folder: Path, url: str) -> None:
        assert PROMETHEUS is not None
        self._relay = Relay(f"{url}/metrics")
        threading.Thread(target=self._relay.serve_forever, daemon=True).start()
        jobs = [{"job_name": "sglang", "static_configs": [{"targets": [f"127.0.0.1:{self._relay.server_port}"]}]}]
        config = {"global": {"scrape_interval": "1s"}, "rule_files": [str(RULES)], "scrape_configs": jobs}
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self.url = f"127.0.0.1:{free_port()}"
        flags = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        with (folder / "prometheus.log").open("w") as log:
            command = [PROMETHEUS, *flags, f"--web.listen-address={self.url}"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def __enter__(self) -> Prometheus:
        wait_until(lambda: self._is_ready() and len(self.query('sum_over_time(up{job="sglang"}[5m]) > 2')) == 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._relay.shutdown()
        self._relay.server_close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that an expression gives now; raises HTTPError if it is not PromQL."""
        return self._get(f"query?{urllib.parse.urlencode({'query': expression})}")["result"]

    def rules(self) -> dict[str, str]:
        """Return the health of each alert rule, by its name."""
        return {rule["name"]: rule["health"] for group in self._get("rules")["groups"] for rule in group["rules"]}

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.url}/api/v1/{path}", timeout=30) as reply:
            return json.load(reply)["data"]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.url}/-/ready", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False
