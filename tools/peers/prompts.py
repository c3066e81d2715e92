"""The texts both sides see: prose and a licence, 320 to 1,300 tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_LICENCE = _HERE.parents[1] / "LICENSE"
_ALICE = _HERE / "alice.txt"


@dataclass(frozen=True)
class Prompt:
    """The first ``num_tokens`` tokens of a file."""

    name: str
    path: Path
    num_tokens: int


PROMPTS = (
    Prompt("alice-320", _ALICE, 320),
    Prompt("licence-777", _LICENCE, 777),
    Prompt("alice-1300", _ALICE, 1300),
)
