"""The dial: the same eight questions about one document, at all of its bytes, at a fifth, and at a twentieth.

Last they are asked with `complete`, which takes back what was evicted.

Progress and answers go to stderr; the last line of stdout is one JSON object. `compare.py` measures beside stock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Annotated, Any

import typer
from kvevict_demo.ask import (
    COMPLETE,
    EXACT,
    HELD_TOKENS,
    Options,
    Streamed,
    ask_all,
    prefix_text,
    question_text,
    reading,
)
from kvevict_demo.log import LOG_QUESTION, log_text
from kvevict_demo.questions import BRANCH_QUESTIONS
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvevict_tools.launcher import STRICT_CHECK_ENV, RunningServer, kvevict_system, launch
from kvevict_tools.measure import flush, plugin_state
from kvevict_tools.models import made_model
from sgl_kvevict.client import CacheReport
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import KVEvictError

POOL_SLOTS = 3300
"""The least: the uncompressed document with eight questions and answers. The model's context sets the most."""
OTHER_SLOTS = 16 + HELD_TOKENS
"""Token slots beside the document and the log: a short question, and about half of what both may generate."""
POLL_S = 0.1
COMPRESSED_WITHIN_S = 60.0
ANSWER_COLUMNS = 16
NEXT = """
Try next
  make serve                     the same server for your own programs (OpenAI API, SGLang's frontend)
  make compare                   stock SGLang, ours with nothing compressed, and ours: about 10 minutes
  make demo ARGS="--budget 0.1"  keep a tenth
  make demo ARGS="--stay"        leave this server up; then: .venv/bin/sgl-kvevict top --web 5660"""


@dataclass
class Reading:
    """The answers of all questions, and the size of the document that they were read from.

    Attributes:
        share: what the document was to take of its bytes; None: as many as all of its entries take (``complete``).
        slots: token slots that it took.
        answers: of the questions, while they grow.
    """

    share: float | None
    slots: int
    answers: Sequence[Streamed] = ()

    @property
    def num_right(self) -> int:
        """Right answers."""
        return sum(answer.is_right for answer in self.answers)

    @property
    def share_of_entries(self) -> float:
        """Part of the entries of the compressed tokens that was read."""
        return fmean(CacheReport.of(answer.meta).compressed.share for answer in self.answers)

    @property
    def bits(self) -> float:
        """Their mean bits per number."""
        return fmean(CacheReport.of(answer.meta).compressed.bits for answer in self.answers)

    def figures(self) -> dict[str, Any]:
        """What the last line of output has of it."""
        return {
            "share": self.share,
            "slots": self.slots,
            "share_of_entries": round(self.share_of_entries, 3),
            "bits": round(self.bits, 2),
            "right_answers": self.num_right,
            "cached_tokens": sum(answer.meta["cached_tokens"] for answer in self.answers),
        }


class Screen:
    """What is shown: finished steps, below them the table of answers, and below it what is being done.

    Args:
        live: display to write on.
        shares: of the columns; a last one is for `complete`.
    """

    def __init__(self, live: Live, shares: Sequence[float]) -> None:
        self.readings: list[Reading] = []
        self._live, self._shares, self._doing = live, (*shares, None), ""
        self._started = time.monotonic()

    def note(self, text: str) -> None:
        """Write a line that stays, with the seconds since the beginning."""
        self._live.console.print(f"{time.monotonic() - self._started:5.1f} s  {text}")

    def doing(self, text: str) -> None:
        """Say what is being done."""
        self._doing = text
        self.draw()

    def draw(self) -> None:
        """Show the readings as they are now."""
        self._live.update(Group(dial_table(self._shares, self.readings), Text(self._doing)))


def main(
    model: Annotated[str, typer.Option(help="Model folder, or a name of 'make model ARGS=--list'.")] = "demo",
    budget: Annotated[float, typer.Option(help="Share of its bytes that is kept.", min=0.1, max=0.5)] = 0.2,
    pool_slots: Annotated[int, typer.Option(help="KV pool, in token slots.", min=POOL_SLOTS, max=7000)] = POOL_SLOTS,
    stay: Annotated[bool, typer.Option(help="Leave the server up until Ctrl-C.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the server's log.")] = Path("out/demo"),
) -> None:
    """Run the demo; see the module's description."""
    console = Console(stderr=True, highlight=False, width=110)
    folder = made_model(model)
    config: dict[str, Any] = {"budget": budget}
    if stay:
        config["events"] = {}
    flags = ("--max-total-tokens", str(pool_slots), "--random-seed", "42", "--enable-metrics", "--enable-cache-report")
    system = kvevict_system("demo", config, flags, {k: v for k, v in STRICT_CHECK_ENV.items() if k.endswith("IDLE")})
    with console.status("starting SGLang with --radix-cache-backend kvevict"):
        server = launch(folder, flags=system.flags, env=system.env, log_path=out / "demo.log")
    with server:
        figures = run(server, console, budget, pool_slots)
        print(json.dumps(figures, allow_nan=False), flush=True)
        if stay:
            console.print(f"\nThe server listens on {server.url}; Ctrl-C ends it.")
            wait_for_interrupt(server)


def run(server: RunningServer, console: Console, budget: float, pool_slots: int) -> dict[str, Any]:
    """Ask the questions at each size of the document, and count.

    Returns:
        The figures of the last line of output; token slots and tokens are different units.

    Raises:
        RuntimeError: the document was not compressed in time.
        LaunchError: the server died.
    """
    flush(server)
    config = KVEvictConfig(budget=budget)
    *_, above_least, least = config.shares
    with Live(console=console, refresh_per_second=8) as live:
        screen = Screen(live, (1.0, budget, least))
        screen.doing("prefill of a handbook")
        with reading(server, prefix_text(), options=EXACT) as whole:
            tokens = int(whole["meta_info"]["prompt_tokens"])
            screen.note(
                f"{tokens:,} tokens of a handbook: {tokens:,} token slots. A request with `exact` keeps them so."
            )
            ask_about(server, screen, tokens, Reading(1.0, held_slots(server, tokens)), EXACT)
        slots = wait_until_compressed(server, tokens)
        screen.note(f"That request is gone, and the handbook was compressed: {slots:,} token slots.")
        ask_about(server, screen, tokens, Reading(budget, slots))
        state = plugin_state(server) or {}
        screen.doing("prefill of a log, which needs slots while another request reads the handbook")
        room = (config.num_slots(tokens, share=above_least) + config.num_slots(tokens, share=least)) // 2
        log = log_of(server, pool_slots - room - OTHER_SLOTS) + question_text(LOG_QUESTION)
        with ExitStack() as log_is_read:
            with reading(server, prefix_text() + question_text(BRANCH_QUESTIONS[0])):
                pressing = log_is_read.enter_context(reading(server, log, options=EXACT))
                slots, grown = held_slots(server, tokens), grown_slots(server)
            screen.note(
                f"A log of {pressing['meta_info']['prompt_tokens']:,} tokens needed slots while another request read "
                f"the handbook, which shrank: {slots:,}."
            )
            # The log leaves no room in which the handbook could grow.
            ask_about(server, screen, tokens, Reading(least, slots))
        last = Reading(None, slots)
        ask_about(server, screen, tokens, last, COMPLETE)
        last.slots += grown_slots(server) - grown
        screen.doing("")
        screen.note(f"The log is gone. Questions with `complete` took back what was evicted: {last.slots:,} slots.")
    server.check_alive()
    after = plugin_state(server) or {}
    leaks = abs(int(after["leaked_slots"])) + len(server.leak_messages())
    console.print(f"\nThe pool has {pool_slots:,} token slots; leaks: {leaks}.")
    console.print(NEXT)
    return {
        "prefix_tokens": tokens,
        "dial": [each.figures() for each in screen.readings if each is not last],
        "complete": last.figures(),
        "answers": len(BRANCH_QUESTIONS),
        "sharers": int(after["max_sharers"]),
        "pool_slots": pool_slots,
        "pressing_tokens": pressing["meta_info"]["prompt_tokens"],
        "pressing_answer_is_right": LOG_QUESTION.is_right(pressing["text"]),
        "pool_leaks": leaks,
        "budget": budget,
        "policy": state["policy"],
    }


def ask_about(
    server: RunningServer, screen: Screen, tokens: int, now: Reading, options: Options = MappingProxyType({})
) -> None:
    """Ask all questions about the document, which has ``tokens`` tokens, as it is in the cache now."""
    screen.readings.append(now)
    screen.doing("eight questions at once")

    def on_word(answers: Sequence[Streamed]) -> None:
        now.answers = answers
        screen.draw()

    now.answers = ask_all(server.url, BRANCH_QUESTIONS, on_word, prefix_tokens=tokens, options=options)
    screen.draw()


def held_slots(server: RunningServer, tokens: int) -> int:
    """Token slots of the document, while nothing else is compressed."""
    state = plugin_state(server) or {}
    return int(tokens - state["span_tokens"] + state["span_slots"])


def grown_slots(server: RunningServer) -> int:
    """Token slots that compressed prefixes have taken for entries that came back, since the start."""
    return int((plugin_state(server) or {})["grown_slots"])


def wait_until_compressed(server: RunningServer, tokens: int) -> int:
    """Return the token slots of the document once it is compressed.

    Raises:
        RuntimeError: not in time.
    """
    begin = time.monotonic()
    while (slots := held_slots(server, tokens)) == tokens:
        if time.monotonic() - begin > COMPRESSED_WITHIN_S:
            raise RuntimeError(f"the document was not compressed within {COMPRESSED_WITHIN_S:.0f} s")
        time.sleep(POLL_S)
    return slots


def log_of(server: RunningServer, num_tokens: int) -> str:
    """The station's log, of as many days as have about ``num_tokens`` tokens of the served model."""
    num_days = 100
    tokens = json.loads(server.post("/tokenize", {"prompt": log_text(num_days)}))["count"]
    return log_text(round(num_days * num_tokens / tokens))


def dial_table(shares: Sequence[float | None], readings: Sequence[Reading]) -> Table:
    """Questions, and for each share of the document's bytes (None: `complete`) what was answered so far."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.add_column("share of the handbook's bytes", no_wrap=True)
    for share in shares:
        title = "complete" if share is None else f"{share:g}"
        table.add_column(title, width=ANSWER_COLUMNS, no_wrap=True, overflow="ellipsis")
    for number, question in enumerate(BRANCH_QUESTIONS):
        cells = [_answer(reading.answers[number]) for reading in readings if reading.answers]
        table.add_row(question.text, *cells)
    table.add_row()
    done = [reading for reading in readings if all(answer.meta for answer in reading.answers) and reading.answers]
    table.add_row("token slots", *(f"{reading.slots:,}" for reading in readings))
    read = (f"{reading.share_of_entries:.0%}, {reading.bits:.1f} bits" for reading in done)
    table.add_row("entries read", *read)
    right = (f"[green]{reading.num_right} of {len(reading.answers)}[/]" for reading in done)
    table.add_row("right answers", *right)
    return table


def _answer(answer: Streamed) -> str:
    is_done = answer.meta and answer.meta["finish_reason"] is not None
    mark = "[green]✓[/]" if answer.is_right else "✗" if is_done else " "
    return f"{mark} " + answer.text.replace("[", "\\[")


def wait_for_interrupt(server: RunningServer) -> None:
    """Return at Ctrl-C, or when the server is gone."""
    try:
        while server.alive:
            time.sleep(1)
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    try:
        typer.run(main)
    except KVEvictError as error:
        sys.exit(f"demo: {error}")
