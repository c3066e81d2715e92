"""Compilations by numba that the next start loads, and that change with every source they are made of."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


def stamp_of(sources: Iterable[Path]) -> int:
    """Hash of sources.

    numba looks a compiled function up by its own file's time and by the numbers it closes over; a function that closes
    over this one is compiled again when any of the sources changes.
    """
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).digest()
    # Seven bytes: numba keys its cache by what a function closes over, and this has to fit its int64.
    return int.from_bytes(digest[:7], "little")


def compiled(what: str, compile_it: Callable[[bool], T]) -> T:
    """Compile, and keep the code beside the sources or else in the user's cache folder.

    Args:
        what: is compiled, for the log.
        compile_it: compiles; takes whether the code is kept on disk.
    """
    try:
        return compile_it(True)
    except RuntimeError as error:
        # Any other RuntimeError is one of the compilation.
        if "no locator available" not in str(error):
            raise
        logger.warning("compiled %s cannot be kept for the next start: set NUMBA_CACHE_DIR to a folder", what)
        return compile_it(False)
