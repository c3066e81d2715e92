"""The screen of ``sgl-kvevict top``: from a state to rich renderables."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sgl_kvevict.cli.output import mean_bits, short_model, show_dial, show_entries
from sgl_kvevict.cli.size import show_bytes
from sgl_kvevict.errors import printable
from sgl_kvevict.events.questions import Description, StatusReport
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


@dataclass
class TopState:
    """Everything on the screen.

    Attributes:
        sort: order of the largest prefixes.
        silent: why there is no newer report; None while the server answers.
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
        if self.status is None or status.started != self.status.started:
            self._history.clear()
        self.status = status
        self.silent = None
        self._history.append((status.ts, status.totals))
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
        text.append(printable(f"  {model}  policy {about.policy}, {show_dial(about)}"), style="default not bold")
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
        cells = round(width * counted / max(pool.total, 1)) - used
        used += cells
        bar.append(glyph * cells, style=colour)
        legend.append(glyph, style=colour)
        legend.append(f" {label} {slots:,}   ")
    memory = f" ({show_bytes(pool.total * slot_bytes)})"
    legend.append(f"of {pool.total:,} token slots{memory}")
    return Text("\n").join([bar, legend])


def _gauges(status: StatusReport) -> Text:
    gauges = status.gauges
    text = Text.assemble(
        (
            f"{gauges.logical_tokens:,} tokens held in {gauges.held_slots:,} slots, {show_bytes(gauges.held_bytes)}",
            "bold",
        )
    )
    text.append(f" ({gauges.tokens_per_slot:.2f} a slot)   {gauges.spans:,} spans in {gauges.segments:,} segments")
    text.append(f", {gauges.shared_spans:,} shared (most readers {gauges.max_readers_per_span})")
    if gauges.span_tokens:
        entries = {bits: getattr(gauges, f"{ENTRIES}{bits}") for bits in (16, 8, 4)}
        shares = f"{gauges.share_of_bytes:.0%} of their bytes, {gauges.share_of_entries:.0%} of their entries"
        text.append(
            f"\n{gauges.span_tokens:,} of these tokens compressed to {show_bytes(gauges.span_bytes)}: {shares} ("
        )
        text.append(f"{show_entries(entries)})\n")
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
