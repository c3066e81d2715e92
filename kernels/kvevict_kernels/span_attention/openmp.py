"""Runs a compiled function on the OpenMP threads of PyTorch.

A second runtime (numba has its own) has its own threads, which take cores from PyTorch's while they spin.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch


class Team:
    """An OpenMP runtime, given as its library or one that is linked to it.

    ``thread_number``, ``thread_count`` and ``barrier`` are addresses of functions without arguments: the number of the
    calling thread in its team, the threads in the team, and a wait until all of them have called it.

    Raises:
        AttributeError: the library lacks GCC's entry points (Intel's and LLVM's runtimes have them too).
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.thread_number = _address(library.omp_get_thread_num)
        self.thread_count = _address(library.omp_get_num_threads)
        self.barrier = _address(library.GOMP_barrier)
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def run(self, function: int, argument: int, num_threads: int) -> None:
        """Call a function on up to ``num_threads`` threads, without Python's lock.

        ``function`` is the address of a function that takes the address ``argument``, returns nothing and raises
        nothing. ``num_threads`` should be PyTorch's number, so that the runtime keeps its team.
        """
        self._parallel(function, argument, num_threads, 0)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


@cache
def torch_team() -> Team | None:
    """PyTorch's runtime; None where it was built without OpenMP."""
    try:
        return Team(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")))
    except (OSError, AttributeError):
        return None
