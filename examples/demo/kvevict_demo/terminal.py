"""A program's screen over time, and an animated picture of it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from rich.console import Console
from rich.text import Text

COLUMNS = 110
FRAME_S = 0.5
HOLD_S = 10.0
"""Seconds for which the last picture stays."""
_CELL_W, _CELL_H, _MARGIN = 8.4, 18, 14
_SPACE = "\N{NO-BREAK SPACE}"
"""Viewers of pictures join several ordinary spaces."""
_CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\r|\n|\x1b.?")
_UNFINISHED = re.compile(r"\x1b(\[[?\d;]*)?\Z")
_GREEN = (2, "#3fb950")
"""The only colour that the demo prints: its number in the terminal, and in the picture."""


class Screen:
    """Lines that a program wrote, each with its colours: what `rich` sends to a terminal that never scrolls."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = 0

    def feed(self, text: str) -> None:
        """Write text with control sequences.

        Raises:
            ValueError: a sequence that `rich` is not known to send.
        """
        at = 0
        for found in _CONTROL.finditer(text):
            self.lines[self._row] += text[at : found.start()]
            at = found.end()
            self._obey(found)
        self.lines[self._row] += text[at:]

    def _obey(self, found: re.Match[str]) -> None:
        sequence, number, final = found[0], found[1], found[2]
        if final == "m":
            self.lines[self._row] += sequence
        elif sequence == "\n":
            self._row += 1
            self.lines += [""] * (self._row == len(self.lines))
        elif final == "A":
            self._row -= int(number or 1)
        elif final == "K":
            self.lines[self._row] = ""
        elif sequence != "\r" and final not in ("h", "l"):  # lines are erased before they are written again
            raise ValueError(f"control sequence: got {sequence!r}; allowed: colours, ESC[A, ESC[K, ESC[?h and ESC[?l")


@dataclass
class Film:
    """What a screen showed: its lines, and from when on, in seconds."""

    frames: list[tuple[float, list[str]]] = field(default_factory=list)
    seconds: float = 0.0

    def shots(self) -> Iterator[tuple[int, str, float, float]]:
        """Yield row and line, and from when to when it was there; the last picture stays for ``HOLD_S``."""
        end = self.seconds + HOLD_S
        for row in range(max(len(lines) for _, lines in self.frames)):
            begin, shown = 0.0, ""
            for at, lines in [*self.frames, (end, [])]:
                line = lines[row] if row < len(lines) else ""
                if line != shown:
                    if shown:
                        yield row, shown, begin, at
                    begin, shown = at, line


def film(command: Sequence[str]) -> tuple[Film, str]:
    """Run a command with standard error on a terminal of ``COLUMNS`` columns; return what it showed, and its output.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 100, COLUMNS, 0, 0))
    screen, recorded = Screen(), Film()
    with tempfile.TemporaryFile("w+") as output:
        started = time.monotonic()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
        process = subprocess.Popen(command, stdout=output, stderr=side, env=environment)
        os.close(side)
        for text in _chunks(terminal):
            screen.feed(text)
            now = time.monotonic() - started
            if recorded.frames and now - recorded.frames[-1][0] < FRAME_S:
                recorded.frames[-1] = (recorded.frames[-1][0], list(screen.lines))
            else:
                recorded.frames.append((now, list(screen.lines)))
        code = process.wait()
        recorded.seconds = time.monotonic() - started
        output.seek(0)
        printed = output.read()
    if code:
        raise subprocess.CalledProcessError(code, list(command), printed, "\n".join(screen.lines))
    return recorded, printed


def _chunks(terminal: int) -> Iterator[str]:
    """Whole characters and control sequences as they come, until the program has closed its side."""
    rest = b""
    while True:
        try:
            rest += os.read(terminal, 65536)
        except OSError:  # EIO: closed
            os.close(terminal)
            return
        try:
            text = rest.decode()
        except UnicodeDecodeError:  # the last character is not complete
            continue
        if _UNFINISHED.search(text):
            continue
        rest = b""
        yield text.replace("\r\n", "\n")


def draw_film(recorded: Film, command: str) -> str:
    """An SVG that shows the film again and again, below a line with the command and the seconds since its start."""
    rows = 2 + max(len(lines) for _, lines in recorded.frames)
    width, height = round(COLUMNS * _CELL_W + 2 * _MARGIN), rows * _CELL_H + 2 * _MARGIN
    total = recorded.seconds + HOLD_S
    clock = [(f"{second:3d} s", second, second + 1.0) for second in range(int(recorded.seconds))]
    clock.append((f"{int(recorded.seconds):3d} s", int(recorded.seconds), total))
    drawn = [_line(0, COLUMNS - 5, f"\x1b[2m{text}\x1b[0m", begin, end, total) for text, begin, end in clock]
    drawn.append(_line(0, 0, f"\x1b[1m$ {command}\x1b[0m", 0.0, total, total))
    drawn += [_line(row + 2, 0, line, begin, end, total) for row, line, begin, end in recorded.shots()]
    fonts = "ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{fonts}" font-size="14"'
    )
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>'
    return "\n".join([f'{head} fill="#d5dde5">', ground, *filter(None, drawn), "</svg>\n"])


def _line(row: int, column: int, line: str, begin: float, end: float, total: float) -> str:
    """One line of the screen, visible from ``begin`` to ``end``; without animation, if it is there at the end."""
    y = _MARGIN + (row + 1) * _CELL_H
    parts, at = [], column
    for segment in Text.from_ansi(line).render(Console()):
        text, style = segment.text.rstrip("\n"), segment.style
        if text.strip():
            is_green = style is not None and style.color is not None and style.color.number == _GREEN[0]
            looks = f' fill="{_GREEN[1]}"' * is_green
            looks += ' font-weight="bold"' * bool(style and style.bold) + ' opacity=".6"' * bool(style and style.dim)
            lead = len(text) - len(text.lstrip())
            shown, length = text.strip().replace(" ", _SPACE), len(text.strip()) * _CELL_W
            x = _MARGIN + (at + lead) * _CELL_W
            parts.append(f'<text x="{x:.1f}" y="{y}" textLength="{length:.1f}"{looks}>{escape(shown)}</text>')
        at += len(text)
    if not parts:
        return ""
    values, times = ["0"] * (begin > 0) + ["1"] + ["0"] * (end < total), [begin, *([end] if end < total else [])]
    moments = ";".join(["0", *(f"{time / total:.4f}" for time in times if time > 0)])
    blink = (
        f'<animate attributeName="opacity" calcMode="discrete" values="{";".join(values)}" keyTimes="{moments}" '
        f'dur="{total:.1f}s" repeatCount="indefinite"/>'
    )
    still = ' opacity="0"' if end < total else ""
    return f"<g{still}>{''.join(parts)}{blink if len(values) > 1 else ''}</g>"
