"""Rows of a run against servers: printed and on disk the moment they are known, and put together to a page later."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_bench import page
from gpu_bench.versions import differences, versions

COLUMNS = {
    "start": {"seconds": "s to start"},
    "first": {"seconds": "s, first document"},
    "cached": {"ms": "ms to first token, cached", "cached_tokens": "cached tokens"},
    "decode 1": {"tokens_s": "tokens/s, 1"},
    "decode 8": {"tokens_s": "tokens/s, 8"},
    "decode 64": {"tokens_s": "tokens/s, 64"},
    "fitting": {"requests_s": "requests/s, fitting"},
    "pressure": {"requests_s": "requests/s, 4 pools", "found": "found"},
    "leaks": {"leaks": "leaks"},
}
"""What of which row becomes a column of the table of servers."""
UNKNOWN = "not measured"
HEAD = "run"
FAILED = "failed"


class Rows:
    """Appends rows to ``rows.jsonl`` in a folder; the first one says when, on what device, with which versions.

    Args:
        folder: is made.
        device: its name.
        seconds: how long the run may take from now on.
        setting: sizes of the run.
        clock: seconds.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        seconds: float,
        setting: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "rows.jsonl"
        self._clock = clock
        self._start = clock()
        self._end = self._start + seconds
        self._versions = versions()
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
        head = {"date": date, "device": device, "versions": self._versions, "differences": differences()}
        self._append({"what": HEAD, **head, "setting": setting})

    def left(self) -> float:
        """Seconds left."""
        return self._end - self._clock()

    def add(self, system: str, what: str, **values: Any) -> None:
        """Print a row and write it; a server's start also has the versions, so that its rows can be read alone."""
        row = {"s": round(self._clock() - self._start, 1), "system": system, "what": what, **values}
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in values.items()}
        text = ", ".join(f"{key} {value}" for key, value in shown.items() if key != "outputs")
        print(f"[{row['s']:6.1f}] {system:18} {what:10} {text}", flush=True)
        self._append(row | {"versions": self._versions} if what == "start" else row)

    def _append(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Rows of several files, in order."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def write_page(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Add the sections of a day's rows to its page; a later row replaces an earlier one of the same system and phase.

    ValueError: the rows have no head, or heads of several devices.
    """
    heads = [row for row in rows if row["what"] == HEAD]
    if len({head["device"] for head in heads}) != 1:
        devices = ", ".join(sorted({head["device"] for head in heads})) or "none"
        raise ValueError(f"rows must come from runs on one device, got {devices}")
    last = {key: value for key, value in heads[-1].items() if key != "what"}
    return page.write(last | {"sections": sections(rows), "failures": failures(rows)}, folder)


def sections(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The table of servers, a line for each system, and what else was found out of them."""
    titles = [title for columns in COLUMNS.values() for title in columns.values()]
    servers: dict[str, dict[str, Any]] = {}
    checks: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        system, what = row.get("system", ""), row["what"]
        if what in COLUMNS:
            line = servers.setdefault(system, {"system": system} | dict.fromkeys(titles, UNKNOWN))
            line |= {title: row.get(name, UNKNOWN) for name, title in COLUMNS[what].items()}
        elif what not in (HEAD, FAILED, "skipped"):
            told = {key: value for key, value in row.items() if key not in ("s", "system", "what", "outputs")}
            result = ", ".join(f"{key} {value}" for key, value in told.items())
            checks[system, what] = {"system": system, "check": what, "result": result}
    found = {"servers": list(servers.values()), "server-checks": list(checks.values())}
    return {name: lines for name, lines in found.items() if lines}


def failures(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Messages of systems whose last start or phase failed."""
    found: dict[str, str] = {}
    for row in rows:
        if row["what"] == FAILED:
            found[f"server, {row['system']}"] = str(row["why"])
        elif row["what"] == "start":
            found.pop(f"server, {row['system']}", None)
    return found
