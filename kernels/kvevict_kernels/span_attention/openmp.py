"""The threads that PyTorch's operations use: its own OpenMP runtime, asked to run a compiled function.

A second runtime (numba brings one) has threads of its own, which take cores from PyTorch's while they spin.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch


class Team:
    """An OpenMP runtime.

    Args:
        library: the runtime, or a library that is linked to it.

    Raises:
        AttributeError: it lacks the entry points that GCC compiles to, which Intel's and LLVM's have, too.

    Attributes:
        thread_number: address of a function without arguments: the number of the calling thread in its team.
        thread_count: likewise: threads in the team.
        barrier: likewise: waits until all threads of the team have called it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.thread_number = _address(library.omp_get_thread_num)
        self.thread_count = _address(library.omp_get_num_threads)
        self.barrier = _address(library.GOMP_barrier)
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def run(self, function: int, argument: int, num_threads: int) -> None:
        """Call a function on up to so many threads at once, without Python's lock.

        Args:
            function: its address; takes one address, returns nothing and raises nothing.
            argument: the address.
            num_threads: PyTorch's number, so that the runtime keeps the team that it has.
        """
        self._parallel(function, argument, num_threads, 0)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


@cache
def torch_team() -> Team | None:
    """PyTorch's runtime; None where it was built without one."""
    try:
        return Team(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")))
    except (OSError, AttributeError):
        return None
