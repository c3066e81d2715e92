"""Stock and ours side by side: all servers run at once, those not measured are suspended."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvevict_tools.launcher import RunningServer, System, kvevict_system, launch_all, stock_system
from kvevict_tools.measure import flush

#: The same for every server: figures for the tables, and no busy waiting while another server is measured.
COMMON_FLAGS = (
    *("--random-seed", "42", "--enable-metrics", "--enable-cache-report", "--sleep-on-idle"),
    *("--watchdog-timeout", "3600"),  # a server is suspended while another is measured, and its watchdog counts that
)

DEFAULT = "default"
"""The system that every headline is about: ours, configured by nobody."""

Progress = Callable[[str], None]
Fleet = dict[str, RunningServer]


def compared_systems(
    pool_slots: int, *, budgets: Sequence[float] = (), has_none: bool = False, beside: Sequence[str] = ()
) -> list[System]:
    """Stock and what it is compared with: same flags, same pool of token slots.

    Args:
        pool_slots: of the KV pool.
        budgets: other ones than the default, each a system with nothing else changed.
        has_none: also ours with policy ``none``.
        beside: policies, or settings like ``host_bytes=0``; each a system of that name with nothing else changed.

    Returns ``stock``, ``none``, ``budget B``, then :data:`DEFAULT`, and those beside it.
    """
    flags = ("--max-total-tokens", str(pool_slots), *COMMON_FLAGS)
    found = [stock_system("stock", flags)]
    if has_none:
        found.append(kvevict_system("none", {"policy": "none"}, flags))
    found += [kvevict_system(f"budget {b:g}", {"budget": b}, flags) for b in budgets]
    found.append(kvevict_system(DEFAULT, {}, flags))
    return found + [kvevict_system(name, setting_of(name), flags) for name in beside]


def setting_of(name: str) -> dict[str, Any]:
    """The configuration that differs: a policy, or ``FIELD=VALUE`` with the value in JSON."""
    field, equals, value = name.partition("=")
    return {field: json.loads(value)} if equals else {"policy": name}


@contextmanager
def running(systems: Sequence[System], model: Path, logs: Path, progress: Progress) -> Iterator[Fleet]:
    """Start all systems, two at a time, and stop them in the end."""
    progress(f"starting {len(systems)} servers: {', '.join(system.name for system in systems)}")
    with launch_all(model, systems, log_folder=logs) as fleet:
        yield fleet


def flush_all(fleet: Fleet) -> None:
    """Empty the caches of all servers."""
    for server in fleet.values():
        flush(server)
