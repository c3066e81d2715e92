"""An event socket for tests that need no SGLang."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgl_kvevict.config import EventsConfig
from sgl_kvevict.events.questions import Description


def ipc_config(folder: Path, **fields: Any) -> EventsConfig:
    """A socket in a folder."""
    return EventsConfig(**dict[str, Any]({"endpoint": f"ipc://{folder}/events"}) | fields)


def description_of(config: EventsConfig, *, started: float = 1.0) -> Description:
    return Description(
        started=started,
        version="0",
        policy="pseudo-random",
        budget=0.3,
        bits="auto",
        slot_bytes=512,
        num_layers=2,
        num_kv_heads=2,
        model="tiny",
        tokenizer="tiny",
        expose_tokens=config.expose_tokens,
    )


def wait_until(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
