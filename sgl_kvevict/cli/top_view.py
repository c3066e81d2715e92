"""The screen of ``sgl-kvevict top``: from a state to rich renderables."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sgl_kvevict.cli.output import mean_bits, short_model, show_dial, show_entries
from sgl_kvevict.cli.size import show_bytes
from sgl_kvevict.errors import printable
from sgl_kvevict.events import types
from sgl_kvevict.events.questions import Description, StatusReport
from sgl_kvevict.events.totals import ENTRIES, Pool, Totals
from sgl_kvevict.events.types import AnyEvent, Dropped, EventBatch

SORT_KEYS = {"s": "slots", "t": "tokens", "r": "readers", "a": "age"}
RATE_WINDOW_S = 10.0
NUM_EVENTS = 8

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
    ("scoring_passes", "scoring passes"),
    ("dropped_nodes", "nodes dropped"),
)


@dataclass
class TopState:
    """Everything on the screen.

    Attributes:
        sort: order of the largest prefixes.
        silent: why there is no newer report; None while the server answers.
        events: time (seconds since the epoch) and event, newest last; without prompts, which would displace all others
            and are in the totals.
        missed: events that did not arrive.
    """

    endpoint: str
    sort: str = "slots"
    description: Description | None = None
    status: StatusReport | None = None
    silent: str | None = None
    events: deque[tuple[float, AnyEvent]] = field(default_factory=lambda: deque(maxlen=200))
    missed: int = 0
    is_long: bool = False
    _next_event: int = 0
    _history: deque[tuple[float, Totals]] = field(default_factory=deque)

    def update(self, status: StatusReport, batches: Sequence[EventBatch] = ()) -> None:
        """Store a report and the events that came before it; rates are computed within one run of the server."""
        if self.status is None or status.started != self.status.started:
            self._history.clear()
            self._next_event = status.next_event
        for batch in batches:
            if batch.started == status.started and batch.end > self._next_event:
                self.missed += max(batch.first - self._next_event, 0)
                part = batch.since(max(batch.first, self._next_event))
                others = (event for event in part.events if not isinstance(event, types.PromptComplete))
                self.events.extend((part.ts, event) for event in others)
                self._next_event = part.end
        self.missed += max(status.next_event - self._next_event, 0)
        self._next_event = max(status.next_event, self._next_event)
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
    num_rows = max(height - NUM_EVENTS - 13, 3)
    parts += [_prefixes(state, num_rows), _events(state), _footer(state)]
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
    refused = totals.refused_in_use + totals.refused_not_cached + totals.refused_no_room + totals.refused_no_memory
    rates.append(f"refused {refused:,}")
    if totals.stored_segments or totals.loaded_segments:
        rates.append(f"stored {totals.stored_segments:,}, loaded {totals.loaded_segments:,}")
    if totals.moved_out_segments:
        moved_in = f"in {totals.moved_in_segments:,} ({show_bytes(totals.moved_in_bytes)})"
        rates.append(f"moved out {totals.moved_out_segments:,} ({show_bytes(totals.moved_out_bytes)}), {moved_in}")
    if totals.growths:
        rates.append(f"grown {totals.growths:,} ({totals.returned_entries:,} entries back)")
    lost = state.status.totals.lost_events
    if lost or state.missed:
        rates.append(f"events lost {lost:,}, missed {state.missed:,}")
    return Text("   ".join(rates), style="cyan")


def _prefixes(state: TopState, num_rows: int) -> Table:
    assert state.status is not None
    table = Table(expand=True, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for name in ("node", "start", "tokens", "slots", "bytes", "entries", "bits", "readers", "spans", "unused for"):
        sorted_by = {"unused for": "age"}.get(name, name) == state.sort
        table.add_column(f"{name} ▼" if sorted_by else name, justify="right")
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
            _duration(row.age_s),
        )
    return table


def _events(state: TopState) -> Panel:
    assert state.status is not None
    now = state.status.ts
    lines = [f"{_duration(max(now - ts, 0)):>7} ago  {printable(what)}" for ts, what in summarise(state.events)]
    return Panel(Text("\n".join(lines[-NUM_EVENTS:])), title="events", title_align="left", height=NUM_EVENTS + 2)


def summarise(events: Iterable[tuple[float, AnyEvent]]) -> Iterator[tuple[float, str]]:
    """Yield time and text of each line; consecutive drops are one line."""
    for is_drop, group in groupby(events, lambda item: isinstance(item[1], Dropped)):
        items = list(group)
        drops = [event for _, event in items if isinstance(event, Dropped)]
        if is_drop and len(drops) > 1:
            num_spans = sum(event.compressed for event in drops)
            tokens, slots = sum(event.tokens for event in drops), sum(event.slots for event in drops)
            what = f"dropped {len(drops):,} nodes, {num_spans:,} of them compressed"
            yield items[-1][0], f"{what}: {tokens:,} tokens, {slots:,} slots released"
        else:
            yield from ((ts, describe(event)) for ts, event in items)


def _footer(state: TopState) -> Text:
    keys = "   ".join(f"[{key}] by {name}" for key, name in SORT_KEYS.items())
    return Text(f"{keys}   [q] quit", style="bright_black")


def describe(event: AnyEvent) -> str:
    """Describe an event in a few words."""
    match event:
        case types.Compressed():
            what = f"compressed tokens {event.start:,}-{event.end:,} into {_size(event)}"
            merged = f", {event.merged_entries:,} entries merged" if event.merged_entries else ""
            where = f"{event.seconds * 1000:.1f} ms, node {event.nodes[-1]}"
            return f"{what}, {event.released_slots:,} released{merged} ({where})"
        case types.Split():
            return f"split node {event.lower} at {event.position:,}; the upper half is node {event.upper}"
        case types.Dropped():
            kind = "compressed" if event.compressed else "uncompressed"
            return f"dropped {kind} node {event.node}: {event.tokens:,} tokens, {event.slots:,} slots released"
        case types.Repacked():
            return f"repacked node {event.node} into {_size(event)}, {event.released_slots:,} released"
        case types.Squeezed():
            evicted = f", {event.evicted_entries:,} entries evicted" if event.evicted_entries else ""
            return f"shrank node {event.node} into {_size(event)}, {event.released_slots:,} released{evicted}"
        case types.PromptComplete():
            return f"found {event.found:,} of {event.tokens:,} tokens of a prompt"
        case types.Grown():
            taken = f"{event.returned_entries:,} evicted entries came back, {event.taken_slots:,} slots taken"
            return f"node {event.node} grew into {_size(event)}: {taken}"
        case types.PrefilledCompressed():
            return f"compressed {event.tokens:,} tokens of a prompt while it was prefilled"
        case types.ScoringPass():
            return f"scored tokens {event.start:,}-{event.end:,} ({event.seconds * 1000:.1f} ms)"
        case types.Refused():
            why = {"in-use": "somebody reads them exactly", "not-cached": "not cached"}.get(event.reason, event.reason)
            return f"left {event.tokens:,} tokens as they are: {why}"
        case types.Stored():
            what = event.error or (f"{event.bytes:,} bytes" if event.bytes else "was there")
            return f"stored {event.tokens:,} tokens: {what}"
        case types.Loaded():
            return f"loaded tokens {event.start:,}-{event.end:,} from the store"
        case types.LoadFailed():
            return f"went on without the store: {event.error or 'it came too late'}"
        case types.MovedOut():
            return f"moved tokens {event.start:,}-{event.end:,} to the host's memory ({event.bytes:,} bytes)"
        case types.MovedIn():
            return f"moved tokens {event.start:,}-{event.end:,} back from the host's memory"
        case types.Cleared():
            return "flushed the whole cache"


def _size(event: types.Compressed | types.Repacked | types.Squeezed | types.Grown) -> str:
    return f"{event.slots:,} slots ({show_bytes(event.bytes)}, {mean_bits(event.entries):.1f} bits)"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"
