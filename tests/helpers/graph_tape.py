"""A CUDA graph without CUDA: what runs while it records is repeated later, on the same memory, with the same numbers.

It keeps a graph's rules that matter to us. Only torch's operators and Triton's launches are repeated, not host code.
Numbers that the host passed stay as they were. Reading from the device while recording is an error. Memory allocated
while recording keeps nothing from one replay to the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from helpers.poison import poison

HOST_READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.lift_fresh")
"""Operators that wait for a device, or copy from memory that the next replay does not find again."""
T = TypeVar("T")


class GraphTape(TorchDispatchMode):
    """Records inside of ``record()``.

    Attributes:
        calls: what a replay does, in order.
        kernels: names of the Triton kernels launched.
        foreign: tensors from outside of the recording that kernels got.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self.kernels: list[str] = []
        self.foreign: list[Tensor] = []
        self._owned: dict[int, Tensor] = {}
        self._is_launching = False

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record operators and launches."""
        launch = GridExecutor.__call__

        def record_launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            self._launch(launch, executor, *args, **kwargs)

        refuse = mock.Mock(side_effect=AssertionError("tolist while a graph records"))
        with (
            mock.patch.object(GridExecutor, "__call__", record_launch),
            mock.patch.object(Tensor, "tolist", refuse),  # no operator: on a CPU it reads the memory itself
            self,
        ):
            yield

    def replay(self) -> None:
        """Repeat what was recorded."""
        for call in self.calls:
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operator; an output that is not a view keeps its memory."""
        kwargs = kwargs or {}
        name = str(func).rpartition(".")[0]
        if self._is_launching:  # the interpreter's own
            return func(*args, **kwargs)
        if name in HOST_READS:
            raise AssertionError(f"{name} while a graph records")
        out = func(*args, **kwargs)
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given]
        self._owned |= {x.untyped_storage().data_ptr(): x for x in made}
        if name in ("aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided"):
            self.calls.append(lambda: _forget(made))
        else:
            self.calls.append(lambda: _again(func, args, kwargs, out))
        return out

    def _launch(self, launch: Callable[..., Any], executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.foreign += [x for x in tensors if x.untyped_storage().data_ptr() not in self._owned]
        self.kernels.append(executor.fn.__name__)
        self.calls.append(lambda: launch(executor, *args, **kwargs))
        self._is_launching = True
        try:
            launch(executor, *args, **kwargs)
        finally:
            self._is_launching = False


def recorded(step: Callable[[], T], tape: GraphTape, device: str) -> tuple[T, Callable[[], None]]:
    """Warm a step up, and record it, on a GPU in a CUDA graph: what it gives, and what repeats it."""
    step()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            return step(), graph.replay
    with tape.record():
        return step(), tape.replay


def _forget(fresh: list[Tensor]) -> None:
    for x in fresh:
        poison(x)


def _again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.copy_(new)
