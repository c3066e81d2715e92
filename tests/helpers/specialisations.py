"""Counts what Triton would compile for an H100, while its interpreter runs the kernels.

A compilation belongs to the types of a launch's arguments, the values of its constants, and what Triton tells apart of
the other values: integers that are 1 or divisible by 16, pointers that are aligned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

_BINDERS: dict[Any, Any] = {}


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, set[str]]]:
    """Yield, per kernel, the keys of what was compiled inside of the block."""
    found: dict[str, set[str]] = {}
    run = InterpretedFunction.run

    def record(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        found.setdefault(self.fn.__name__, set()).add(_key(self, args, kwargs))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    with mock.patch.object(InterpretedFunction, "run", record):
        yield found


def _key(kernel: InterpretedFunction, args: Any, kwargs: Any) -> str:
    if kernel.fn not in _BINDERS:
        jitted = JITFunction(kernel.fn, **kernel.kwargs)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        _BINDERS[kernel.fn] = create_function_from_signature(jitted.signature, jitted.params, backend)
    _, specialization, options = _BINDERS[kernel.fn](*args, **kwargs)
    return str(compute_cache_key({}, specialization, options))
