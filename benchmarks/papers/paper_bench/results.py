"""Numbers of the experiments: one row for each (paper, measure, case, text), in one CSV file that later runs add to."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

Key = tuple[str, str, str, int]


@dataclass
class Results:
    """The file, and what it holds."""

    path: Path

    def __post_init__(self) -> None:
        self.values: dict[Key, float] = {}
        if self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    self.values[row["paper"], row["measure"], row["case"], int(row["text"])] = float(row["value"])

    def has(self, paper: str, measure: str, case: str, text: int) -> bool:
        """Whether a number is there already."""
        return (paper, measure, case, text) in self.values

    def add(self, paper: str, measure: str, case: str, text: int, value: float) -> None:
        """Add a number; :meth:`write` keeps it."""
        self.values[paper, measure, case, text] = value

    def write(self) -> None:
        """Write the file, in one rename."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".part")
        with scratch.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["paper", "measure", "case", "text", "value"])
            writer.writerows([*key, f"{value:.6g}"] for key, value in sorted(self.values.items()))
        scratch.rename(self.path)

    def per_text(self, paper: str, measure: str, case: str) -> dict[int, float]:
        """The numbers of one case, by text."""
        return {key[3]: value for key, value in self.values.items() if key[:3] == (paper, measure, case)}

    def cases(self, paper: str, measure: str) -> list[str]:
        """All cases of a measure."""
        return list(dict.fromkeys(key[2] for key in sorted(self.values) if key[:2] == (paper, measure)))


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """Mean, and its standard error over the texts (nan for fewer than two)."""
    numbers = list(values)
    mean = sum(numbers) / len(numbers)
    if len(numbers) < 2:
        return mean, math.nan
    variance = sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)
    return mean, math.sqrt(variance / len(numbers))
