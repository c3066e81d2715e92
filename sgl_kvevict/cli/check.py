"""``sgl-kvevict check``: prints what this machine has and lacks for a server."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from sgl_kvevict.cli.parameters import Json


def check(
    device: Annotated[
        Literal["auto", "cuda", "cpu"], typer.Option(help="Of the server; auto: cuda where torch sees a GPU.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Say what this machine has and lacks; exit code 1: a server could not start."""
    from sgl_kvevict.machine import check_environment, check_machine, check_packages, read_machine
    from sgl_kvevict.support import MACHINE, reasons

    machine = read_machine()
    chosen = device if device != "auto" else "cuda" if machine.gpus else "cpu"
    common = check_packages(machine) + check_environment(machine)
    checks = {name: common + check_machine(machine, name) for name in ("cuda", "cpu")}
    can_start = {name: not any(reasons(MACHINE, line) for line in lines) for name, lines in checks.items()}
    if as_json:
        found = {name: [asdict(line) for line in lines] for name, lines in checks.items()}
        typer.echo(json.dumps({"device": chosen, "can_start": can_start[chosen], "checks": found}))
        raise typer.Exit(0 if can_start[chosen] else 1)
    for name, lines in checks.items():
        if name != chosen and device != "auto":
            continue
        verdict = "a server could start" if can_start[name] else "a server could not start"
        typer.echo(f"{'GPU' if name == 'cuda' else 'CPU'}: {verdict}")
        for line in lines:
            typer.echo(f"  {line.state:8} {line.name:14} {line.found}")
            if line.mend:
                typer.echo(f"{'':26}-> {line.mend}")
    raise typer.Exit(0 if can_start[chosen] else 1)
