"""Runs compiled functions on the OpenMP threads of PyTorch; the next start loads them, until a source changes.

A second runtime (numba has its own) has its own threads, which take cores from PyTorch's while they spin.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

logger = logging.getLogger(__name__)


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


class Call(NamedTuple):
    """A compiled function, the threads that run it, and the stamp that it expects as the first of its words."""

    team: Team
    function: Any  # numba's C callback; its argument is the address of a list of 64-bit words
    stamp: int

    def run(self, words: NDArray[np.int64], num_threads: int) -> None:
        """Run it on so many threads; PyTorch's number, so that its runtime keeps its team."""
        self.team.run(self.function.address, words.ctypes.data, num_threads)


def compiled(what: str, sources: Iterable[str | None], compile_it: Callable[[int, bool], Any]) -> Call:
    """Compile, and keep the code beside the sources or else in the user's cache folder.

    Args:
        what: is compiled, for the log.
        sources: files of which it is made, beside those of ``span_attention``'s compiled code.
        compile_it: compiles; takes the stamp, and whether the code is kept on disk. The code has to read the stamp:
            numba looks a function up by its own file's time and by the numbers it closes over.
    """
    # Imported here: numba may be missing, and its code links this module's threads.
    from kvevict_kernels.span_attention import numba_impl, numba_rows, numba_vectors

    team, modules = torch_team(), (numba_impl, numba_rows, numba_vectors)
    assert team is not None, "reason_not_to_run was not asked"
    numba_impl.link(team)
    content = b"".join(Path(str(source)).read_bytes() for source in (*sources, *(each.__file__ for each in modules)))
    # Seven bytes: numba keys its cache by what a function closes over, and this has to fit its int64.
    stamp = int.from_bytes(hashlib.sha256(content).digest()[:7], "little")
    try:
        return Call(team, compile_it(stamp, True), stamp)
    except RuntimeError as error:
        # Any other RuntimeError is one of the compilation.
        if "no locator available" not in str(error):
            raise
        logger.warning("compiled %s cannot be kept for the next start: set NUMBA_CACHE_DIR to a folder", what)
        return Call(team, compile_it(stamp, False), stamp)
