"""Stock SGLang, this plugin with nothing compressed, and this plugin: same model, pool size and programs, in turn.

Progress goes to stderr; tables, the path of a picture and, as the last line, one JSON object to stdout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from kvevict_demo.exercise import Exercise, expected_s
from kvevict_demo.picture import draw_comparison
from kvevict_demo.progress import Progress
from kvevict_demo.report import answers_table, figures_table, json_line, summary
from kvevict_demo.systems import Figures, Rounds, systems
from rich.console import Console

from kvevict_tools.launcher import System, launch_all
from kvevict_tools.models import made_model
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import KVEvictError

POOL_SLOTS = 6000
NUM_ROUNDS = 5
START_S = 25.0
"""Seconds to start a server, for the estimate of what is left."""
SERVER_GB = 3.5
"""Memory of one server with the demo model, all its processes."""


def main(
    model: Annotated[str, typer.Option(help="Model folder, or a name of 'make model ARGS=--list'.")] = "demo",
    policy: Annotated[str | None, typer.Option(help="Policy; default: the configuration's own.")] = None,
    budget: Annotated[float | None, typer.Option(help="Share in (0, 1]; default: likewise.")] = None,
    pool_slots: Annotated[int, typer.Option(help="KV pool of every server, in token slots.")] = POOL_SLOTS,
    rounds: Annotated[int, typer.Option(help="Rounds of every measurement.", min=1)] = NUM_ROUNDS,
    out: Annotated[Path, typer.Option(help="Folder for logs and the picture.")] = Path("out/demo"),
) -> None:
    """Run the comparison; see the module's description."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    config: dict[str, Any] = {}
    if policy is not None:
        config["policy"] = policy
    if budget is not None:
        config["budget"] = budget
    folder = made_model(model)
    compared = systems(config, pool_slots)
    groups = _groups(compared, console)
    is_in_turn = len(groups) == 1
    progress = Progress(lambda text: console.print(text, markup=False))
    progress.expect(len(compared) * START_S + expected_s((system.name for system in compared), rounds))
    measured = Rounds()
    runs: list[Figures] = []
    for group in groups:
        names = ", ".join(system.name for system in group)
        progress.step(f"starting {names}", len(group) * START_S)
        with launch_all(folder, group, log_folder=out) as fleet:
            runs += Exercise(fleet, rounds, pool_slots, measured, progress).run()
    _print_results(runs, measured, pool_slots, KVEvictConfig(**config), out, is_in_turn=is_in_turn)


def _groups(compared: tuple[System, ...], console: Console) -> list[tuple[System, ...]]:
    """All systems at once, or one after the other where memory does not hold them."""
    available_gb = psutil.virtual_memory().available / 1e9
    if available_gb >= SERVER_GB * len(compared):
        return [compared]
    needed = f"{SERVER_GB * len(compared):.0f} GB"
    console.print(f"{available_gb:.1f} GB of memory are free, {needed} needed to measure in turn: no ratios are shown")
    return [(system,) for system in compared]


def _print_results(
    runs: list[Figures], measured: Rounds, pool_slots: int, config: KVEvictConfig, out: Path, *, is_in_turn: bool
) -> None:
    console = Console(width=160)
    console.print(answers_table(runs))
    console.print(figures_table(runs, measured, pool_slots, is_in_turn=is_in_turn))
    chosen = {"policy": config.policy, "budget": config.budget}
    figures = summary(runs, measured, pool_slots, is_in_turn=is_in_turn, **chosen)  # type: ignore[arg-type]
    title = f"a pool of {pool_slots:,} token slots; {config.policy}, budget {config.budget}"
    fitting = figures["documents_that_fit"]
    figures["picture"] = str(draw_comparison(fitting, measured.requests_per_s, title, out / "demo.png"))
    print(f"picture of what fits, and how fast: {figures['picture']}")
    print(json_line(figures), flush=True)


if __name__ == "__main__":
    try:
        typer.run(main)
    except KVEvictError as error:
        sys.exit(f"compare: {error}")
