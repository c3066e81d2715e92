"""Functions that numba compiles for PyTorch's threads; the next start loads them, until a source of theirs changes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvevict_kernels.span_attention import numba_impl, numba_rows, numba_vectors
from kvevict_kernels.span_attention.openmp import Team, torch_team

logger = logging.getLogger(__name__)


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
