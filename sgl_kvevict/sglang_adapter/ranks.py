"""Tensor-parallel ranks: schedulers with the same tree, each with the KV of its own heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed

from sgl_kvevict.errors import InvariantError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TensorRanks:
    """Exchange of numbers between the ranks; all must call a method at the same point.

    All ranks take the same decisions in the same order, from tree and queue alone. Only numbers that depend on what a
    rank's heads kept need agreement. Without a ``group`` (for CPU tensors) there is a single rank.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.is_first = self.rank == 0  # it handles sockets, metrics and logs

    def largest(self, value: int, *same: int) -> int:
        """Largest ``value`` of all ranks.

        Raises :class:`InvariantError` if the ranks differ in one of ``same`` (as many on each), because continuing with
        different trees would corrupt answers.
        """
        if self.size == 1:
            return value
        # The largest of the negated numbers is the negated smallest, so one all-reduce finds both bounds.
        numbers = torch.tensor([value, *same, *(-number for number in same)])
        distributed.all_reduce(numbers, distributed.ReduceOp.MAX, group=self._group)
        result, *bounds = numbers.tolist()
        highest, lowest = bounds[: len(same)], [-number for number in bounds[len(same) :]]
        if highest != lowest:
            raise InvariantError(
                f"the tensor-parallel ranks' trees differ: this rank has {list(same)}, all have {lowest} to {highest}"
            )
        return int(result)

    def gather_tensors(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, by rank, on the CPU; shape and dtype must be the same on each."""
        # The group exchanges CPU tensors, without waiting for the forward in flight.
        mine = mine.cpu().contiguous()
        if self.size == 1:
            return [mine]
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(parts, mine, group=self._group)
        return parts

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return every rank's numbers, by rank; the count must be the same on each."""
        return [part.tolist() for part in self.gather_tensors(torch.tensor(numbers, dtype=torch.int64))]
