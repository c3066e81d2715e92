"""Tensor-parallel ranks as threads with a real process group (gloo) between them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import HashStore


def on_two_ranks(run: Callable[[int, distributed.ProcessGroup], Any]) -> list[Any]:
    """Run a function as two ranks; return what they return."""
    store = HashStore()

    def rank(number: int) -> Any:
        group: Any = distributed.ProcessGroupGloo(store, number, 2, timedelta(seconds=30))
        return run(number, group)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))
