"""How commands print tables and trees: as wide as the terminal, or as wide as they are into a pipe or a file."""

from __future__ import annotations

from rich.console import Console, RenderableType

PIPE_COLUMNS = 10_000


def print_shaped(renderable: RenderableType) -> None:
    """Print a table or a tree; one row is one line unless a terminal is too narrow for it."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_COLUMNS)
    with console.capture() as capture:
        console.print(renderable, highlight=False)
    lines = capture.get().splitlines()
    console.file.write("".join(f"{line.rstrip()}\n" for line in lines))


def shorten(text: str, num_chars: int) -> str:
    """The first characters of a text, the last of them an ellipsis if some are left out."""
    return text if len(text) <= num_chars else f"{text[: num_chars - 1]}…"


def short_model(path: str) -> str:
    """A model's hub name, or the last part of its folder's path; at most 40 characters."""
    return shorten(path.rstrip("/").rpartition("/")[2] if path.startswith(("/", ".", "~")) else path, 40)
