"""Rows of results, which lie in a CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from kvevict_tools.csv_rows import read_records, write_records


@dataclass(frozen=True)
class Row:
    """One system with one pool on one sample of conversations; tokens are those of the prompts.

    Attributes:
        share: the pool's part of the working set.
        slots: of the pool, units of 64 tokens.
        pool: share of prompt tokens found in the pool, ``host``: on the host.
        kept_bytes: bytes kept of a token found, to those of an uncompressed one; ``kept_entries``: part of its entries.
        kept_bits: bits of a number in their rows.
        prefill_s: seconds of prefills; ``load_s``: of loads from the host; both from the roofline.
        first_token_s: median seconds from a request to its first token.
        replay_s: seconds that the replay took on this machine.
    """

    system: str
    share: float
    seed: int
    slots: int
    requests: int
    prompt_tokens: int
    pool: float
    host: float
    kept_bytes: float
    kept_entries: float
    kept_bits: float
    prefill_s: float
    load_s: float
    first_token_s: float
    clock_s: float
    replay_s: float

    @property
    def point(self) -> tuple[str, float, int]:
        """What was replayed."""
        return self.system, self.share, self.seed

    @property
    def found(self) -> float:
        """Share of prompt tokens found."""
        return self.pool + self.host

    @property
    def busy_s(self) -> float:
        """Seconds of prefills and loads."""
        return self.prefill_s + self.load_s

    @staticmethod
    def median(rows: Sequence[Row]) -> Row:
        """Medians of rows of the same system and share."""
        values = [asdict(row) for row in rows]
        numbers = {name: median(each[name] for each in values) for name in values[0] if name != "system"}
        return Row(**{**values[0], **numbers})


def read(path: Path) -> list[Row]:
    """Read a CSV file of rows; none if it does not exist."""
    return read_records(path, Row)


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV."""
    write_records(path, Row, rows, ".6g")
