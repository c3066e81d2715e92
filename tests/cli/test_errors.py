"""Every command: an error is one line on standard error with a code that is not 0, never a traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import HTTPServer
from pathlib import Path

import pytest

from helpers.command_line import run
from helpers.stored import identity, record, tokens
from helpers.web_servers import QuietHandler, serving
from sgl_kvevict.cli import app
from sgl_kvevict.store.segments import SegmentStore, open_backend

TEXT = "tests: a prefix"


@pytest.fixture
def places(tmp_path):
    """Names for command lines: ``{file}`` is a file, ``{text}`` a prefix, ``{below}`` lies below a file."""
    (tmp_path / "file").write_text("just a file")
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin").write_bytes(b"\xe9\xff")
    (tmp_path / "list").write_text("[1, 2]")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "sized").mkdir()
    (tmp_path / "list_folder").mkdir()
    (tmp_path / "list_folder" / "config.json").write_text("[1]")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 8}
    (tmp_path / "sized" / "config.json").write_text(json.dumps(sizes))
    own = identity()
    space = own.namespace(None, None)
    SegmentStore(open_backend(str(tmp_path / "stored")), own).put(record(own, space, tokens(32)), space)
    return {path.stem: str(path) for path in tmp_path.iterdir()} | {
        "below": str(tmp_path / "file" / "x"),
        "missing": str(tmp_path / "missing"),
        "tmp": str(tmp_path),
    }


class NotSGLang(QuietHandler):
    """Answers everything with a JSON number."""

    timeout = 0.5

    def do_POST(self) -> None:
        self.answer(b"7")


@pytest.fixture(scope="module")
def other_server():
    """A web server that is not SGLang."""
    with serving(HTTPServer(("127.0.0.1", 0), NotSGLang)) as server:
        yield f"127.0.0.1:{server.server_port}"


@pytest.fixture(scope="module")
def mute_server():
    """A port that answers every connection with a line that is no HTTP."""

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(b"\xff\x00\x1b[2J not HTTP\r\n\r\n")

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=answer)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


SIZE = "size --prefix-tokens 9 --pool-tokens 9 --model"
COMMAND_LINES = [
    *("policies nope", "policies snapkv nope", "policies --nope"),
    *("model --dir {file}", "model --dir {below}", "model --dir /proc/nope", "model nope"),
    *(f"{SIZE} {{file}}", f"{SIZE} {{missing}}", f"{SIZE} {{empty}}", f"{SIZE} {{broken}}", f"{SIZE} /nowhere"),
    *(
        f"{SIZE} {{list_folder}}",
        "size",
        "size --model {empty} --prefix-tokens 9 --kv-memory much",
        "size --model {empty} --prefix-tokens 0",
    ),
    *("store", "store nope", "store ls", "store ls {missing}", "store ls {file}", "store ls {below}"),
    *("store ls ~nobody-at-all/x", "store ls nonsense://x", "store ls memory://nowhere", "store ls mooncake://"),
    *("store ls file:///nowhere/at/all", "store ls mooncake://127.0.0.1:1/x"),
    *("store show {missing} abcd", "store show {empty} abcd", "store rm {empty}", "store rm {missing} --all"),
    *("store verify {missing}", "store push {missing} {tmp}/target", "store push {stored} {below}"),
    *("store push {stored} ~nobody-at-all/x", "store pull {below} {stored}", "store pull {empty} {missing}"),
    *("warm {dead}", "warm http://{dead} --text-file {missing}", "warm http://{dead} --text-file {empty}"),
    *("warm http://{dead} --text-file {latin}", "warm http://{dead} --messages-file {bad}"),
    *("warm http://{dead} --messages-file {list}", "warm http://{dead} --text-file {text}"),
    *("warm http://{other} --text-file {text}", "warm http://{mute} --text-file {text}"),
    *("warm http://[::1 --text-file {text}", "warm http://127.0.0.1:abc --text-file {text}"),
    *("warm 127.0.0.1:30000 --text-file {text}", "warm ftp://127.0.0.1 --text-file {text}"),
    *("warm http://127.0.0.1:99999 --text-file {text}", "warm http:// --text-file {text}"),
    *("warm http://{long} --text-file {text}", "warm http://a.invalid --text-file {text}"),
    *("top nowhere", "top 127.0.0.1:0", "top 127.0.0.1:99999", "top ipc://", "top ipc://{long}", "top --interval 0"),
    *("inspect nowhere", "inspect 127.0.0.1:0", "inspect ipc://{long}", "inspect {dead} --timeout 0.1"),
    *("inspect {other} --timeout 0.1", "inspect {dead} --node 0"),
    *("serve", "serve {missing} --dry-run", "serve {empty} --dry-run --budget much", "serve {empty} x --dry-run"),
    *("serve {empty} --dry-run --config {bad}", "serve {empty} --dry-run --config {missing}"),
    "serve {empty} --dry-run --config {empty}",
    "serve {empty} --dry-run --policy nope",
    *("nope", "--nope"),
]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_an_error_is_one_line(capsys, places, other_server, mute_server, line):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        dead = f"127.0.0.1:{unused.getsockname()[1]}"
        names = places | {"dead": dead, "other": other_server, "mute": mute_server, "long": "x" * 300}
        code, out, error = run(capsys, *(word.format(**names) for word in line.split()))
    assert code in (1, 2) and out == ""
    first, *reasons = error.splitlines()
    if line != "store":  # without arguments it prints its help
        assert first.startswith("sgl-kvevict: error: ") and len(error) > 30
        assert all(reason.startswith("  - ") for reason in reasons) and (not reasons or line.startswith("serve"))
    assert "\x1b" not in error and "Traceback" not in error and "[Errno" not in error.split(":")[1]


@pytest.mark.parametrize("arguments", [("warm", "", "--text-file", "{text}"), ("store", "ls", ""), ("top", "")])
def test_an_empty_argument_is_refused(capsys, places, arguments):
    code, out, error = run(capsys, *(argument.format(**places) for argument in arguments))
    assert (code, out) == (2, "") and error.count("\n") == 1 and "got ''" in error


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_top_with_a_count_ends_with_an_error_if_nobody_answered(capsys, other_server, how):
    code, out, error = run(capsys, "top", other_server, "--count", "1", "--timeout", "0.1", *how)
    assert code == 1 and "no answer from" in out  # the screen, or the JSON object of one report
    assert error == f"sgl-kvevict: error: no answer from tcp://{other_server}\n"


def command_names() -> list[tuple[str, ...]]:
    import typer.main

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return [(), *((name,) for name in commands), *(("store", name) for name in commands["store"].commands)]


@pytest.mark.parametrize("command", command_names(), ids=" ".join)
def test_every_command_has_its_help(capsys, command):
    code, out, error = run(capsys, *command, "-h")
    assert (code, error) == (0, "") and out.startswith("Usage: ") and "--help" in out


def test_the_reader_of_a_pipe_may_stop(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    code = "from sgl_kvevict.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "policies"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (
            "serve demo --port 30000",
            "error: No such option: --port (-h shows what is allowed; SGLang's own flags follow --)",
        ),
        (
            "serve dmeo --dry-run",
            "got 'dmeo', no such folder; allowed: a folder, a hub name (OWNER/NAME), or a name in ",
        ),
        ("store ls {missing}", "which is not a folder; allowed: the folder or URL of a server's store"),
        ("inspect {dead} --timeout 0.1", "s (serve --events opens this socket)"),
        ("warm http://{mute} --text-file {text}", "/generate: the answer is not HTTP; is this the port of SGLang"),
        (f"inspect {{dead}} --node {2**64}", "Invalid value for '--node'"),
        ("size --model {sized} --prefix-tokens 9", "--pool-tokens and --kv-memory: give one of them"),
        (f"{SIZE} {{sized}} --budget 2.5", "budget: got 2.5; allowed: a float"),
        (f"{SIZE} ./nowhere", "no such folder"),
        (f"{SIZE} {{sized}} --host-memory x", "--host-memory: got 'x'; allowed: an"),
        *((f"store show {{stored}} {key}", "names 0 segments") for key in ("ab", "zzzz")),
        ("store rm {stored}", "give keys, or --all"),
        ("warm http://{dead}", "--text-file and --messages-file: give one of them"),
        ("policies nope", "got 'nope'; allowed: none, "),
    ],
)
def test_a_newcomer_reads_what_to_do(capsys, places, mute_server, line, part):
    names = places | {"dead": "127.0.0.1:1", "mute": mute_server}
    code, _, error = run(capsys, *(word.format(**names) for word in line.split()))
    is_asked = "{mute}" in line or "--timeout" in line  # what it was told is in order, but no server answers
    assert code == (1 if is_asked else 2) and part in error


def test_one_reason_keeps_the_dashes_of_its_flag(capsys, places):
    Path(places["empty"], "config.json").write_text("{}")
    code, _, error = run(capsys, "serve", places["empty"], "--dry-run", "--", "--page-size", "16")
    assert code == 2 and error.startswith("sgl-kvevict: error: invalid arguments: --page-size is 16, ")


TORCH_FREE = [
    *("--help", "--version", "top 127.0.0.1:1 --count 1 --timeout 0.1 --json", "inspect 127.0.0.1:1 --timeout 0.1"),
    "warm http://127.0.0.1:1 --text-file {text}",
    "store ls {empty}",
    "size --model {sized} --prefix-tokens 9 --pool-tokens 9000",
]


@pytest.mark.parametrize("line", TORCH_FREE)
def test_commands_that_need_no_torch_do_not_import_it(places, line):
    code = (
        "import json, sys\nfrom sgl_kvevict.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print(json.dumps(sorted({'torch', 'transformers', 'sglang', 'numba'} & set(sys.modules))))"
    )
    command = [sys.executable, "-c", code, *line.format(**places).split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
