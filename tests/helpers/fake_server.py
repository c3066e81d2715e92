"""A stand-in for ``sglang.launch_server``, for what starts and ends servers."""

from __future__ import annotations

from pathlib import Path

#: Stands in for ``sglang.launch_server``: starts a helper process, then answers ``/health`` like SGLang.
FAKE_SERVER = """
import http.server, os, subprocess, sys, urllib.parse
port = int(sys.argv[sys.argv.index("--port") + 1])
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("helper", helper.pid, "config", os.environ.get("KVEVICT_CONFIG"), flush=True)
if "--fail" in sys.argv:
    print("refused: two reasons", flush=True)
    sys.exit(3)
if "--leak" in sys.argv:
    print("ValueError: pool memory leak detected! [full] total=10", flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += 1
        ready = Handler.asked > 1 and "--never" not in sys.argv
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(b'{"path": "%s"}' % self.path.encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def install(folder: Path) -> dict[str, str]:
    """Write the stand-in below a folder; return the variables of processes that start it."""
    package = folder / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(FAKE_SERVER)
    return {"PYTHONPATH": str(package.parent)}


def helper_pid(log: str) -> int:
    """Process id of the child that the stand-in started."""
    return int(log.split("helper ")[1].split()[0])


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
