"""A stream beside the scheduler's, for tests without a GPU: what is launched runs as late as it may, or twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from sgl_kvevict.compression import Chosen

T = TypeVar("T")


class LateStream:
    """Runs work only when its result is asked for.

    Attributes:
        waiting: work whose result nobody has asked for, by number of its launch.
        num_launched: work launched so far.
    """

    is_beside = True

    def __init__(self) -> None:
        self.waiting: dict[int, Callable[[], Any]] = {}
        self.num_launched = 0

    def launch(self, work: Callable[[], T]) -> Callable[[], T]:
        self.num_launched += 1
        number, values = self.num_launched, []
        self.waiting[number] = work

        def result() -> T:
            if number in self.waiting:
                del self.waiting[number]
                values.append(work())
            return values[0]

        return result

    def run_given_up(self) -> None:
        """Run what nobody has asked for: a device would do so as well."""
        for work in self.waiting.values():
            work()
        self.waiting.clear()


class TwiceStream(LateStream):
    """Runs work at its launch and again when its result is asked for: nothing that it reads may change meanwhile."""

    def launch(self, work: Callable[[], T]) -> Callable[[], T]:
        early = work()
        late = super().launch(work)

        def result() -> T:
            value = late()
            assert_same_choice(early, value)
            return value

        return result


def assert_same_choice(one: object, other: object) -> None:
    """Compare what two runs of one policy keep, bit by bit."""
    assert isinstance(one, Chosen) and isinstance(other, Chosen)
    for pair in zip(_tensors(one), _tensors(other), strict=True):
        assert torch.equal(*pair)


def _tensors(chosen: Chosen) -> list[torch.Tensor]:
    selection, worth = chosen.decision.selection, chosen.decision.worth
    return [selection.keep_lens, selection.indices, *([] if worth is None else [worth])]
