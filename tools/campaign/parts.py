"""What the campaign consists of: parts that are done in units, one seed each, so that any of them can be run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Counts = Mapping[str, float]
"""What a unit did; ``done`` is what counts towards the target."""


@dataclass(frozen=True)
class Part:
    """One part of the campaign.

    Attributes:
        name: on the command line and in the table.
        what: what is done, in the table's words.
        target: how much of ``done`` is wanted.
        unit: does one unit, given its seed and a share of its usual size (1.0; less in the test suite), and returns
            what it did. It raises if anything is wrong. Counts that begin with "largest" are not added up.
        kinds: units with the seeds ``0 .. kinds - 1`` are of all kinds that there are.
    """

    name: str
    what: str
    target: int
    unit: Callable[[int, float], Counts]
    kinds: int
