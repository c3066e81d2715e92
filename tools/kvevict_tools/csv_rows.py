"""CSV files of results: rows of text by column, or records of one dataclass."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")

_PARSE: Mapping[str, Callable[[str], object]] = {
    "str": str,
    "int": int,
    "float": float,
    "float | None": lambda text: float(text) if text else None,
}


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a file; none if it does not exist."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, names: Iterable[str], rows: Iterable[Mapping[str, object]], number: str = "") -> None:
    """Write rows with the columns ``names``; ``number``: format of floats, as :func:`format` takes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(names), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            cells = {name: format(cell, number) if isinstance(cell, float) else cell for name, cell in row.items()}
            writer.writerow(cells)


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Records of a file, whose fields are columns: text, numbers, and numbers or None; none if it does not exist.

    A column that is not there is empty.
    """
    make: Callable[..., Record] = kind
    return [
        make(**{each.name: _PARSE[str(each.type)](row.get(each.name, "")) for each in fields(kind)})
        for row in read_rows(path)
    ]


def write_records(path: Path, kind: type[Record], records: Sequence[Record], number: str = "") -> None:
    """Write records as :func:`read_records` reads them; ``number`` as in :func:`write_rows`."""
    rows: list[dict[str, Any]] = [asdict(record) for record in records]
    write_rows(path, [each.name for each in fields(kind)], rows, number)
