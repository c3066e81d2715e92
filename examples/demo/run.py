"""A document compressed before your eyes, eight questions at once on the one copy, a document longer than the pool.

Progress and answers go to stderr; the last line of stdout is one JSON object. `compare.py` measures beside stock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from kvevict_demo.ask import Streamed, ask, ask_all, prefix_text
from kvevict_demo.log import LOG_QUESTION, log_text
from kvevict_demo.questions import BRANCH_QUESTIONS
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvevict_tools.launcher import STRICT_CHECK_ENV, RunningServer, kvevict_system, launch
from kvevict_tools.measure import flush, idle_gauges, plugin_state
from kvevict_tools.models import made_model
from sgl_kvevict.client import CacheReport
from sgl_kvevict.errors import KVEvictError

POOL_SLOTS = 3500
"""The least: the uncompressed document and a scoring pass. The model's context sets the most."""
POLL_S = 0.2
SCORE_TIMEOUT_S = 300.0
NEXT = """
Try next
  make serve                     the same server for your own programs (OpenAI API, SGLang's frontend)
  make compare                   stock SGLang beside ours, measured in turn: 6 to 12 minutes
  make demo ARGS="--budget 0.1"  keep a tenth
  make demo ARGS="--stay"        leave this server up; then: .venv/bin/sgl-kvevict inspect"""


def main(
    model: Annotated[str, typer.Option(help="Model folder, or a name of 'make model ARGS=--list'.")] = "demo",
    budget: Annotated[float, typer.Option(help="Share of entries kept.", min=0.01, max=1.0)] = 0.2,
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
    """Compress the document, ask about it, serve one that is longer than the pool, and count.

    Returns:
        The figures of the last line of output; token slots and tokens are different units.

    Raises:
        LaunchError: the server died, or the document was not compressed in time.
    """
    flush(server)
    empty = idle_gauges(server).evictable
    tokens = cache_document(server, console)
    slots = idle_gauges(server).evictable - empty
    state = plugin_state(server) or {}
    console.print(draw_tree(tokens, state["span_tokens"], state["span_slots"]))
    console.print("Eight questions at once; all read the one compressed copy:")
    with Live(console=console, refresh_per_second=8) as live:
        answers = ask_all(server.url, BRANCH_QUESTIONS, lambda growing: live.update(answers_table(growing)))
        live.update(answers_table(answers))
    sharers = int((plugin_state(server) or {})["max_sharers"])
    long = ask_long(server, console, pool_slots)
    after = plugin_state(server) or {}
    server.check_alive()
    leaks = abs(int(after["leaked_slots"])) + len(server.leak_messages())
    num_right = sum(answer.is_right for answer in answers)
    console.print(f"\n{num_right + long.is_right} of {len(answers) + 1} answers are right; pool leaks: {leaks}.")
    console.print(
        f"The document holds {slots:,} of {pool_slots:,} token slots; stock SGLang: {tokens:,} (computed, one a token)."
    )
    console.print(NEXT)
    return {
        "prefix_tokens": tokens,
        "prefix_slots": slots,
        "stock_prefix_slots": tokens,
        "compressed_tokens": state["span_tokens"],
        "compressed_slots": state["span_slots"],
        "sharers": sharers,
        "right_answers": num_right,
        "answers": len(answers),
        "cached_tokens": sum(answer.meta["cached_tokens"] for answer in answers),
        "pool_slots": pool_slots,
        "long_prompt_tokens": long.meta["prompt_tokens"],
        "long_prompt_compressed": CacheReport.of(long.meta).prefilled_compressed,
        "long_answer_is_right": long.is_right,
        "pool_leaks": leaks,
        "budget": budget,
        "policy": state["policy"],
    }


def cache_document(server: RunningServer, console: Console) -> int:
    """Send the document as SGLang's frontend language does (no answer wanted), and wait until it is compressed.

    Returns:
        Its length in tokens.

    Raises:
        RuntimeError: it was not compressed in time.
    """
    started = time.monotonic()
    with console.status("prefill of the document") as status:
        body = {"text": prefix_text(), "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
        tokens = int(json.loads(server.post("/generate", body))["meta_info"]["prompt_tokens"])
        console.print(
            f"{time.monotonic() - started:5.1f} s  {tokens:,} tokens are in the cache, {tokens:,} token slots"
        )
        while not (state := plugin_state(server) or {}).get("spans"):
            if time.monotonic() - started > SCORE_TIMEOUT_S:
                raise RuntimeError(f"the document was not compressed within {SCORE_TIMEOUT_S:.0f} s: {state}")
            status.update("the model repeats the document in extra passes, to find out which entries it needs")
            time.sleep(POLL_S)
    held = state["span_slots"] + tokens - state["span_tokens"]
    console.print(f"{time.monotonic() - started:5.1f} s  scored and compressed: {held:,} token slots\n")
    return tokens


def draw_tree(tokens: int, span_tokens: int, span_slots: int) -> str:
    """The radix tree with the document, before its questions."""
    tail = tokens - span_tokens
    return (
        "  the radix tree                    tokens    token slots\n"
        "         |                       (logical)         (held)\n"
        f"  station_handbook.txt              {span_tokens:6,}         {span_slots:6,}    compressed\n"
        f"         |                          {tail:6,}         {tail:6,}    its tail, uncompressed\n"
        "  +--+--+--+--+--+--+--+\n"
        "  8 questions\n"
    )


def ask_long(server: RunningServer, console: Console, pool_slots: int) -> Streamed:
    """Ask about the station's log, which has more tokens than the pool has slots; its chunks shrink as they come."""
    console.print("\nA document longer than the pool; stock SGLang refuses it:")
    answer = Streamed(LOG_QUESTION)
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool, console.status("prefill of the station's log") as status:
        asked = pool.submit(ask, server.url, log_text(pool_slots), answer)
        while not asked.done():
            state = plugin_state(server) or {}
            computed, free = state["long_prompt_computed"], state["free_slots"]
            if computed:
                status.update(f"prefill: {computed:,} tokens are computed, {free:,} token slots are free")
            time.sleep(POLL_S)
        asked.result()
    tokens, compressed = answer.meta["prompt_tokens"], CacheReport.of(answer.meta).prefilled_compressed
    console.print(
        f"{time.monotonic() - started:5.1f} s  {tokens:,} tokens in a pool of {pool_slots:,} token slots; "
        f"{compressed:,} were compressed on the way"
    )
    console.print(answers_table([answer]))
    return answer


def answers_table(answers: Sequence[Streamed]) -> Table:
    """Questions with what is answered so far."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    for answer in answers:
        mark = "[green]✓[/]" if answer.is_right else " "
        table.add_row(mark, answer.question.text, (answer.question.lead + " " + answer.text).replace("[", "\\["))
    return table


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
