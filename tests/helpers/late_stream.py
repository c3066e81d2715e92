"""A stream beside the scheduler's, for tests without a GPU: what is launched runs as late as it may, or twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from sgl_kvevict.policies.order import RangeOrder

T = TypeVar("T")


class LateStream:
    """Runs work only when its result is asked for, or when the stream catches up.

    Attributes:
        waiting: work that has not run, by number of its launch.
        num_launched: work launched so far.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, Callable[[], None]] = {}
        self.num_launched = 0

    def launch(self, work: Callable[[], T]) -> Callable[[], T]:
        self.num_launched += 1
        number = self.num_launched
        values: list[T] = []
        self.waiting[number] = lambda: values.append(work())

        def result() -> T:
            if number in self.waiting:
                self.waiting.pop(number)()
            return values[0]

        return result

    def catch_up(self) -> None:
        """Run what waits, given up or not, as a device would at some time."""
        while self.waiting:
            self.waiting.pop(min(self.waiting))()


class TwiceStream(LateStream):
    """Runs work at its launch and again when its result is asked for: nothing that it reads may change meanwhile."""

    def launch(self, work: Callable[[], T]) -> Callable[[], T]:
        early = work()
        late = super().launch(work)

        def result() -> T:
            value = late()
            assert isinstance(early, RangeOrder) and isinstance(value, RangeOrder)
            assert torch.equal(early.keys, value.keys)  # bit by bit
            return value

        return result
