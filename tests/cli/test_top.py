"""``sgl-kvevict top`` against a watched tree."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading

import msgspec
import pytest
from rich.console import Console

from helpers.command_line import run
from helpers.event_sockets import description_of, ipc_config, wait_until
from helpers.watched import WatchedHarness
from sgl_kvevict.cli.top import TopState, render, run_top
from sgl_kvevict.config import EventsConfig
from sgl_kvevict.events.questions import Prefix, StatusReport
from sgl_kvevict.events.totals import Gauges, Totals

pytestmark = pytest.mark.usefixtures("server_args")


def report(ts: float = 100.0, compressions: int = 4, started: float = 40.0) -> StatusReport:
    return StatusReport(
        ts=ts,
        started=started,
        gauges=msgspec.convert(
            dict.fromkeys(Gauges.__struct_fields__, 0)
            | {"pool": {"total": 1000, "free": 400, "compressed": 300, "full": 200, "private": 100}}
            | {"logical_tokens": 1700, "held_slots": 500, "tokens_per_slot": 3.4, "span_tokens": 1500}
            | {"span_slots": 300, "slot_bytes": 512, "held_bytes": 500 * 512, "span_bytes": 300 * 512}
            | {"share_of_bytes": 0.2, "share_of_entries": 0.45, "entries_16": 24, "entries_4": 2676}
            | {"beside_bytes": 27_000, "spans": 3, "segments": 2, "dead_entries": 5, "pending_ranges": 1}
            | {"shared_spans": 1, "readers": 4, "readers_per_span": 4 / 3, "max_readers_per_span": 3}
            | {"host_bytes": 2_000_000, "host_used_bytes": 500_000, "host_segments": 3}
            | {"evicted_entries_kept": 700, "evicted_bytes_kept": 40_000},
            Gauges,
        ),
        totals=Totals(compressions=compressions, compressed_tokens=100 * compressions),
        prefixes=[
            Prefix(7, 0, 1200, 240, 240 * 512, 0.5, {16: 300, 4: 2100}, 2, 3),
            Prefix(9, 1200, 300, 60, 60 * 512, 0.25, {4: 300}, 1, 0),
        ],
    )


def drawn(state: TopState, width: int = 100) -> str:
    console = Console(width=width, height=40, file=io.StringIO(), color_system=None)
    console.print(render(state, width, 40))
    return console.file.getvalue()


def test_the_screen_shows_pool_prefixes_and_rates():
    config = EventsConfig()
    state = TopState("tcp://here:1", description=description_of(config))
    state.update(report(100.0, 4))
    state.update(report(102.0, 10))
    text = drawn(state)
    bar = next(line for line in text.splitlines() if line.startswith("█"))
    assert [bar.count(glyph) for glyph in "█▓▒░"] == [30, 20, 10, 40]
    assert "compressed 300" in text and "uncompressed 200" in text and "in requests 100" in text
    assert "1,700 tokens held in 500 slots, 256.0 KB (3.40 a slot)" in text
    assert "1,500 of these tokens compressed to 153.6 KB: 20% of their bytes, 45% of their entries" in text
    assert "(24 entries of 16 bits, 2,676 of 4), and 27.0 KB beside the pool" in " ".join(text.split())
    words = " ".join(text.split())
    assert "keeps 0.3, bits auto" in words and "of 1,000 token slots (512.0 KB)" in words
    assert "compressions 3.0/s" in text and "tokens compressed 300/s" in text
    assert "7 0 1,200 240 20% 50% 5.5 3 2" in " ".join(text.split())
    assert "host: 3 segments and 700 evicted entries, 500.0 KB of 2.0 MB" in words
    assert "slots ▼" in text
    assert "[q] quit" in text
    assert "up 1 min" in text


def test_what_the_other_end_says_does_not_command_the_terminal():
    """Any process of the machine may have taken the address."""
    bell, config = "\x1b]0;title\x07\x1b[2J\nline", EventsConfig()
    about = msgspec.structs.replace(description_of(config), model=bell, policy=bell)
    state = TopState("tcp://here:1", description=about, is_long=True)
    state.update(report())
    state.silent = bell
    assert "\x1b" not in drawn(state) and drawn(state).count("\\x1b]0;title") == 3
    state.status = None
    assert "\x1b" not in drawn(state) and "\\x1b[2J\\nline" in drawn(state)


@pytest.mark.parametrize(
    ("counted", "hidden", "says"),
    [
        ({"stored_segments": 1200, "loaded_segments": 7}, "loaded", "stored 1,200, loaded 7"),
        (
            {"moved_out_segments": 12, "moved_out_bytes": 600_000, "moved_in_segments": 4, "moved_in_bytes": 7000},
            "moved",
            "moved out 12 (600.0 KB), in 4 (7.0 KB)",
        ),
        ({"growths": 2, "returned_entries": 1234}, "grown", "grown 2 (1,234 entries back)"),
        ({"refused_in_use": 1, "refused_not_cached": 20, "refused_no_memory": 4000}, "refused 4", "refused 4,021"),
    ],
)
def test_what_was_done_is_shown_once_there_is_some(counted, hidden, says):
    state, later = TopState("x"), report()
    state.update(report())
    assert hidden not in drawn(state, 200)
    later.totals = Totals(**counted)
    state.update(later)
    assert says in " ".join(drawn(state, 200).split())


def test_a_prompt_longer_than_the_pool_is_shown_while_it_is_prefilled():
    state = TopState("x")
    state.update(report())
    assert "longer than the pool" not in drawn(state, 200)
    long = report()
    long.gauges = msgspec.structs.replace(long.gauges, long_prompt_tokens=3648, long_prompt_computed=1311)
    state.update(long)
    assert "prompt longer than the pool: 1,311 of 3,648 tokens computed" in " ".join(drawn(state, 200).split())


def test_a_server_that_does_not_answer_is_said_so_and_the_last_report_stays():
    state = TopState("tcp://here:1", silent="no answer from tcp://here:1 within 5 s")
    assert "no answer from tcp://here:1" in drawn(state)
    state.update(report())
    assert state.silent is None
    state.silent = "no answer within 5 s"
    assert "NO ANSWER: no answer within 5 s" in drawn(state) and "1,700 tokens" in drawn(state)


def test_rates_are_of_the_last_seconds_and_of_one_server_run():
    state = TopState("x")
    assert state.rate("compressions") == 0
    for second in range(30):
        state.update(report(100.0 + second, 2 * second))
    assert state.rate("compressions") == pytest.approx(2)
    state.update(report(200.0, 1, started=150.0))
    assert state.rate("compressions") == 0
    state.update(report(201.0, 6, started=150.0))
    assert state.rate("compressions") == pytest.approx(5)


def test_json_lines_carry_reports(tmp_path, capsys):
    with WatchedHarness(ipc_config(tmp_path)) as watched:
        watched.keep_turning(with_traffic=True)
        code, out, _ = run(capsys, "top", f"ipc://{tmp_path}/events", "--json", "--count", "4", "--timeout", "60")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(lines) == 4 and all(line["connected"] for line in lines)
    pool = lines[-1]["status"]["gauges"]["pool"]
    assert sum(pool[name] for name in ("free", "compressed", "full", "private")) == pool["total"] == 240


def test_a_restarted_server_is_found_again(tmp_path, capsys):
    config = ipc_config(tmp_path)
    options = {"interval_s": 0.1, "timeout_s": 0.4, "count": 60}
    lines: list[dict] = []

    def seen(condition) -> None:
        def check() -> bool:
            lines.extend(json.loads(line) for line in capsys.readouterr().out.splitlines())
            return any(condition(line) for line in lines)

        wait_until(check)

    first = WatchedHarness(config, started=1.0)
    first.keep_turning()
    state = TopState(config.endpoint)
    watching = threading.Thread(target=run_top, args=(state,), kwargs={"as_json": True, **options})
    watching.start()
    seen(lambda line: line["connected"] and line["status"]["started"] == 1.0)
    first.close()
    seen(lambda line: not line["connected"] and "no answer" in line["error"])
    with WatchedHarness(config, started=2.0) as second:
        second.keep_turning(with_traffic=True)
        seen(lambda line: line["connected"] and line["status"]["started"] == 2.0)
        seen(lambda line: line["connected"] and line["status"]["totals"]["compressions"])
        watching.join()


def test_keys_sort_and_quit_on_a_terminal(tmp_path):
    with WatchedHarness(ipc_config(tmp_path)) as watched:
        watched.keep_turning(with_traffic=True)
        code = "from sgl_kvevict.cli import main; main()"
        command = [sys.executable, "-c", code, "top", f"ipc://{tmp_path}/events"]
        terminal, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        environ = {**os.environ, "TERM": "xterm-256color"}
        process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environ)
        os.close(inner)
        screen = ""
        for expected, key in (("slots ▼", "t"), ("tokens ▼", "r"), ("readers ▼", "x"), ("quit", "q")):
            while expected not in screen:
                if select.select([terminal], [], [], 0.2)[0]:
                    screen += os.read(terminal, 65536).decode(errors="replace")
            screen = ""
            os.write(terminal, key.encode())
        with contextlib.suppress(OSError):  # raised at the end: the process closed its side
            while os.read(terminal, 65536):
                pass
        os.close(terminal)
        assert process.wait(300) == 0
