"""Prints tables and trees in the width of the terminal; unlimited in a pipe or file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from sgl_kvevict.errors import printable

PIPE_COLUMNS = 10_000


def print_shaped(renderable: RenderableType) -> None:
    """Print a table or a tree, one row per line unless the terminal is too narrow."""
    console = Console()
    if not console.is_terminal:
        # Rich would take 80 columns for a pipe, and cut or fold what another program is to read.
        console = Console(width=PIPE_COLUMNS)
    with console.capture() as capture:
        console.print(renderable, highlight=False)
    lines = capture.get().splitlines()
    # Rich pads lines to the width of the table; the spaces would wrap in a narrow terminal.
    console.file.write("".join(f"{line.rstrip()}\n" for line in lines))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> None:
    """Print rows of any texts below the names of their columns, and a caption below them."""
    table = Table(*columns, box=None, pad_edge=False, caption=caption or None, caption_justify="left")
    for row in rows:
        # As `Text`: in a plain string brackets of a path or a name are Rich's markup.
        table.add_row(*(Text(printable(cell)) for cell in row))
    print_shaped(table)


def shorten(text: str, num_chars: int) -> str:
    """Cut a text to ``num_chars`` characters; the last one is then an ellipsis."""
    return text if len(text) <= num_chars else f"{text[: num_chars - 1]}…"


def short_model(path: str) -> str:
    """A model's hub name, or the last part of its folder's path; at most 40 characters."""
    return shorten(path.rstrip("/").rpartition("/")[2] if path.startswith(("/", ".", "~")) else path, 40)


def show_entries(entries: Mapping[int, int]) -> str:
    """Describe entries by the bits of their rows: ``16 entries of 16 bits, 1,008 of 4``."""
    (first, *others) = sorted(((bits, count) for bits, count in entries.items() if count), reverse=True) or [(16, 0)]
    texts = [f"{first[1]:,} {'entry' if first[1] == 1 else 'entries'} of {first[0]} bits"]
    return ", ".join([*texts, *(f"{count:,} of {bits}" for bits, count in others)])


def mean_bits(entries: Mapping[int, int]) -> float:
    """Bits of a number in the rows of some entries, on average; 16 if there are none."""
    num_entries = sum(entries.values())
    return sum(bits * count for bits, count in entries.items()) / num_entries if num_entries else 16.0
