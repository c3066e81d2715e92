"""Stock SGLang against compressed prefixes, on one model, one pool size and the same real programs.

Progress goes to stderr; tables, the path of a picture and, as the last line, one JSON object to stdout.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from kvevict_demo.picture import draw_kept
from kvevict_demo.report import answers_table, figures_table, json_line, summary
from kvevict_demo.systems import Figures, run_system, systems
from rich.console import Console

from sgl_kvevict.model import ensure_demo_model

POOL_SLOTS = 6000


def _budget(text: str) -> float | int:
    """``0.2`` is a share, ``500`` a number of entries per head; checked by the server."""
    return int(text) if text.isdigit() else float(text)


def main(
    model: Annotated[Path | None, typer.Option(help="Model folder; default: the demo model.")] = None,
    policy: Annotated[str, typer.Option(help="Policy of the compressed run.")] = "reconstruction",
    budget: Annotated[str, typer.Option(help="Share in (0, 1], or entries per head.")] = "0.2",
    pool_slots: Annotated[int, typer.Option(help="KV pool of every server, in token slots.")] = POOL_SLOTS,
    out: Annotated[Path, typer.Option(help="Folder for logs and the picture.")] = Path("out/demo"),
) -> None:
    """Run the comparison; see the module's description."""
    progress = Console(stderr=True, soft_wrap=True)
    share = _budget(budget)
    folder = model or ensure_demo_model(report=progress.print)
    num_layers = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])
    started = time.monotonic()
    runs: list[Figures] = []
    for system in systems(policy, share, pool_slots):

        def step(text: str, name: str = system.name) -> None:
            progress.print(f"[dim]{time.monotonic() - started:5.0f} s[/]  [bold]{name}[/]: {text}")

        log_path = out / f"{system.name.replace(' ', '-')}.log"
        runs.append(run_system(system, folder, log_path, step))
    stock, full, compressed = runs
    console = Console(width=160)
    console.print(answers_table(runs))
    console.print(figures_table(runs, pool_slots))
    figures = summary(stock, full, compressed, policy=policy, budget=share)
    kept = compressed.state.get("kept")
    if kept is not None:
        title = f"{policy}, budget {share}: what is kept of {kept['end'] - kept['start']:,} tokens"
        figures["picture"] = str(draw_kept(kept, num_layers, title, out / "kept.png"))
        print(f"picture of what each (layer, head) kept: {figures['picture']}")
    print(json_line(figures), flush=True)


if __name__ == "__main__":
    typer.run(main)
