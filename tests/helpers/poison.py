"""Fill memory that nobody has written yet with values that cannot go unnoticed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor


def poison(x: Tensor) -> Tensor:
    """Fill with NaN, with the lowest integer, or with True. Returns the same tensor."""
    if x.dtype == torch.bool:
        return x.fill_(True)
    return x.fill_(float("nan")) if x.dtype.is_floating_point else x.fill_(torch.iinfo(x.dtype).min)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Tensor:
    """Make a tensor full of poison."""
    return poison(torch.zeros(shape, dtype=dtype, device=device))


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Poison what ``torch.empty`` and its relatives return: an output that is not fully written shows up."""

    def wrap(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: poison(allocate(*args, **kwargs))

    with contextlib.ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        yield
