"""Servers that add up where their forwards spend their time (``timers/kvevict_timers.py``)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from kvevict_tools.launcher import System

sys.path.append(str(Path(__file__).resolve().parents[1] / "timers"))

import kvevict_timers
from kvevict_timers import COSTS, FORWARDS, VARIABLE

__all__ = ["COSTS", "FORWARDS", "Phase", "seconds_in", "with_timers"]

FOLDER = Path(kvevict_timers.__file__).parent
Phase = Literal["prefill", "decode"]


def with_timers(systems: Sequence[System], folder: Path) -> tuple[list[System], dict[str, Path]]:
    """The same systems with timers, and the file that each of them writes."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {system.name: (folder / f"{system.name}.json").resolve() for system in systems}
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    timed = [
        replace(system, env={**system.env, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: str(files[system.name])})
        for system in systems
    ]
    return timed, files


def seconds_in(path: Path, phase: Phase) -> dict[str, float]:
    """Seconds by cost since the server started, and the number of forwards (``FORWARDS``); the server is idle."""
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))[phase]
    return found
