"""``sgl-kvevict top``: watch a server's cache live, on the terminal or as JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import uvloop
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sgl_kvevict.cli.output import mean_bits, short_model, show_entries
from sgl_kvevict.cli.size import show_bytes
from sgl_kvevict.errors import printable
from sgl_kvevict.events.client import InspectClient, RequestFailedError, ServerSilentError
from sgl_kvevict.events.questions import Describe, Description, Status, StatusReport
from sgl_kvevict.events.totals import ENTRIES, Pool, Totals

SORT_KEYS = {"s": "slots", "t": "tokens", "r": "readers"}
RATE_WINDOW_S = 10.0

# Part of the pool, its label, its glyph (readable without colours) and its colour.
_POOL_PARTS = (
    ("compressed", "compressed", "█", "green"),
    ("full", "uncompressed", "▓", "blue"),
    ("private", "in requests", "▒", "yellow"),
    ("free", "free", "░", "bright_black"),
)
_RATES = (
    ("prompt_tokens", "prompt tokens"),
    ("found_tokens", "of them found"),
    ("compressions", "compressions"),
    ("compressed_tokens", "tokens compressed"),
    ("released_slots", "slots released"),
    ("evicted_entries", "entries evicted"),
    ("merged_entries", "entries merged"),
    ("dropped_nodes", "nodes dropped"),
)


def run_top(
    state: TopState, *, as_json: bool, interval_s: float = 1.0, rows: int = 50, timeout_s: float = 5.0, count: int = 0
) -> None:
    """Show reports until so many were shown (``count``; 0: no end), ``q`` or Ctrl-C.

    ServerSilentError: a count was given, and no report came at all.
    """
    watcher = _Watcher(state, interval_s, rows, timeout_s, count)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(watcher.print_json() if as_json else watcher.draw())


class _Watcher:
    def __init__(self, state: TopState, interval_s: float, rows: int, timeout_s: float, count: int) -> None:
        self.state = state
        self._interval_s, self._rows, self._timeout_s, self._count = interval_s, rows, timeout_s, count
        self._changed = asyncio.Event()
        self._quit = asyncio.Event()

    async def draw(self) -> None:
        console = Console()
        with _keys(self._press), Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            async for _ in self._reports():
                live.update(render(self.state, console.width, console.height), refresh=True)

    async def print_json(self) -> None:
        async for _ in self._reports():
            state = self.state
            line: dict[str, object] = {"endpoint": state.endpoint, "connected": state.silent is None}
            if state.silent is None:
                line["status"] = state.status
            else:
                line["error"] = state.silent
            sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
            sys.stdout.flush()

    async def _reports(self) -> AsyncIterator[None]:
        """Yield after each report: one per interval, and one after each key; ends with the count or with ``q``."""
        num_reports = 0
        async with InspectClient(self.state.endpoint, self._timeout_s) as client:
            while not self._quit.is_set():
                # Before the question: a key that is pressed while the server answers is not forgotten.
                self._changed.clear()
                await self._ask(client)
                yield
                num_reports += 1
                if num_reports == self._count:
                    if self.state.status is None:
                        raise ServerSilentError(f"no answer from {self.state.endpoint}")
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self._interval_s)

    async def _ask(self, client: InspectClient) -> None:
        state = self.state
        fields = {"op": "status", "limit": self._rows, "sort": state.sort}
        try:
            status = await client.ask(msgspec.convert(fields, Status), StatusReport)
            if state.description is None or state.description.started != status.started:
                state.description = await client.ask(Describe(), Description)
            state.update(status)
        except (ServerSilentError, RequestFailedError) as error:
            state.silent = str(error)

    def _press(self, key: str) -> None:
        if key in ("q", "\x03", "\x04"):
            self._quit.set()
        elif key in SORT_KEYS:
            self.state.sort = SORT_KEYS[key]
        else:
            return
        self._changed.set()


@contextlib.contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call ``press`` with every typed key, if standard input is a terminal."""

    def read_keys() -> None:
        for key in os.read(stdin, 64).decode(errors="replace"):
            press(key)

    if not sys.stdin.isatty():
        yield
        return
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    loop = asyncio.get_running_loop()
    tty.setcbreak(stdin)
    loop.add_reader(stdin, read_keys)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        # Also after an error: the shell would not show what is typed.
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


@dataclass
class TopState:
    """Everything on the screen.

    Attributes:
        sort: order of the largest prefixes.
        silent: why there is no newer report; None while the server answers.
        is_long: show the model's name in full.
    """

    endpoint: str
    sort: str = "slots"
    description: Description | None = None
    status: StatusReport | None = None
    silent: str | None = None
    is_long: bool = False
    _history: deque[tuple[float, Totals]] = field(default_factory=deque)

    def update(self, status: StatusReport) -> None:
        """Store a report; rates are computed within one run of the server."""
        # Totals of a new run begin at 0, and would give negative rates.
        if self.status is None or status.started != self.status.started:
            self._history.clear()
        self.status = status
        self.silent = None
        self._history.append((status.ts, status.totals))
        # Two are kept in any case: with an interval longer than the window there would be no rate at all.
        while len(self._history) > 2 and status.ts - self._history[0][0] > RATE_WINDOW_S:
            self._history.popleft()

    def rate(self, name: str) -> float:
        """Growth of a total per second, over the last ``RATE_WINDOW_S`` seconds."""
        if len(self._history) < 2:
            return 0.0
        (then, before), (now, after) = self._history[0], self._history[-1]
        return float(getattr(after, name) - getattr(before, name)) / max(now - then, 1e-9)


def render(state: TopState, width: int, height: int) -> RenderableType:
    """Draw the whole screen."""
    parts: list[RenderableType] = [_header(state)]
    if state.status is None:
        parts.append(Text(printable(state.silent or "waiting for the first answer ..."), style="yellow"))
        return Group(*parts, _footer(state))
    gauges = state.status.gauges
    parts += [_pool_bar(gauges.pool, gauges.slot_bytes, width), _gauges(state.status), _rates(state)]
    parts += [_prefixes(state, max(height - 11, 3)), _footer(state)]
    return Group(*parts)


def _header(state: TopState) -> Text:
    text = Text(f"sgl-kvevict top  {state.endpoint}", style="bold")
    if state.description is not None:
        about = state.description
        model = about.model if state.is_long else short_model(about.model)
        dial = f"policy {about.policy}, keeps {about.budget}, bits {about.bits}"
        text.append(printable(f"  {model}  {dial}"), style="default not bold")
    if state.status is not None:
        text.append(f"  up {_duration(state.status.ts - state.status.started)}", style="default not bold")
        if state.silent is not None:
            text.append(printable(f"  NO ANSWER: {state.silent}"), style="bold red")
    return text


def _pool_bar(pool: Pool, slot_bytes: int, width: int) -> Text:
    bar, legend = Text(), Text()
    used = 0
    counted = 0
    for name, label, glyph, colour in _POOL_PARTS:
        slots = getattr(pool, name)
        counted += slots
        # Rounded as a sum, so that the parts always fill the whole width.
        cells = round(width * counted / max(pool.total, 1)) - used
        used += cells
        bar.append(glyph * cells, style=colour)
        legend.append(glyph, style=colour)
        legend.append(f" {label} {slots:,}   ")
    legend.append(f"of {pool.total:,} token slots ({show_bytes(pool.total * slot_bytes)})")
    return Text("\n").join([bar, legend])


def _gauges(status: StatusReport) -> Text:
    gauges = status.gauges
    held = f"{gauges.logical_tokens:,} tokens held in {gauges.held_slots:,} slots, {show_bytes(gauges.held_bytes)}"
    text = Text().append(held, style="bold")
    text.append(f" ({gauges.tokens_per_slot:.2f} a slot)   {gauges.spans:,} spans in {gauges.segments:,} segments")
    text.append(f", {gauges.shared_spans:,} shared (most readers {gauges.max_readers_per_span})")
    if gauges.span_tokens:
        entries = {bits: getattr(gauges, f"{ENTRIES}{bits}") for bits in (16, 4)}
        shares = f"{gauges.share_of_bytes:.0%} of their bytes, {gauges.share_of_entries:.0%} of their entries"
        text.append(
            f"\n{gauges.span_tokens:,} of these tokens compressed to {show_bytes(gauges.span_bytes)}: {shares} ("
        )
        text.append(f"{show_entries(entries)}), and {show_bytes(gauges.beside_bytes)} beside the pool\n")
    if gauges.host_bytes:
        used, total = show_bytes(gauges.host_used_bytes), show_bytes(gauges.host_bytes)
        kept = f"{gauges.evicted_entries_kept:,} evicted entries"
        text.append(f"   host: {gauges.host_segments:,} segments and {kept}, {used} of {total}")
    if gauges.long_prompt_tokens:
        computed = f"{gauges.long_prompt_computed:,} of {gauges.long_prompt_tokens:,} tokens"
        text.append(f"   prompt longer than the pool: {computed} computed", style="yellow")
    text.append(f"   {gauges.pending_ranges:,} ranges waiting   {gauges.dead_entries:,} dead entries")
    return text


def _rates(state: TopState) -> Text:
    assert state.status is not None
    rates = [f"{label} {_number(state.rate(name))}/s" for name, label in _RATES]
    totals = state.status.totals
    refused = totals.refused_in_use + totals.refused_not_cached + totals.refused_no_memory
    rates.append(f"refused {refused:,}")
    if totals.stored_segments or totals.loaded_segments:
        rates.append(f"stored {totals.stored_segments:,}, loaded {totals.loaded_segments:,}")
    if totals.moved_out_segments:
        moved_in = f"in {totals.moved_in_segments:,} ({show_bytes(totals.moved_in_bytes)})"
        rates.append(f"moved out {totals.moved_out_segments:,} ({show_bytes(totals.moved_out_bytes)}), {moved_in}")
    if totals.growths:
        rates.append(f"grown {totals.growths:,} ({totals.returned_entries:,} entries back)")
    return Text("   ".join(rates), style="cyan")


def _prefixes(state: TopState, num_rows: int) -> Table:
    assert state.status is not None
    table = Table(expand=True, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for name in ("node", "start", "tokens", "slots", "bytes", "entries", "bits", "readers", "spans"):
        table.add_column(f"{name} ▼" if name == state.sort else name, justify="right")
    for row in state.status.prefixes[:num_rows]:
        table.add_row(
            str(row.node),
            f"{row.start:,}",
            f"{row.tokens:,}",
            f"{row.slots:,}",
            f"{row.slots / max(row.tokens, 1):.0%}",
            f"{row.kept:.0%}",
            f"{mean_bits(row.entries):.1f}",
            str(row.readers),
            str(row.spans),
        )
    return table


def _footer(state: TopState) -> Text:
    keys = "   ".join(f"[{key}] by {name}" for key, name in SORT_KEYS.items())
    return Text(f"{keys}   [q] quit", style="bright_black")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"
