"""The picture of a recorded run shows what the terminal showed, when it showed it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kvevict_demo.terminal import HOLD_S, Film, Screen, draw_film, film

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def visible(picture: str, at: float | None = None) -> tuple[set[str], list[str]]:
    """Texts of the title line, and of the lines below it; None: as viewers that do not animate show them."""
    shown: dict[int, list[str]] = {}
    for group in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        is_there = group.get("opacity") != "0"
        if at is not None and (blink := group.find(f"{SVG}animate")) is not None:
            moment = at / float(blink.attrib["dur"].removesuffix("s"))
            steps = zip(blink.attrib["keyTimes"].split(";"), blink.attrib["values"].split(";"), strict=True)
            is_there = [value for begin, value in steps if float(begin) <= moment][-1] == "1"
        for text in group.iter(f"{SVG}text"):
            if is_there:
                shown.setdefault(int(text.attrib["y"]), []).append((text.text or "").replace("\N{NO-BREAK SPACE}", " "))
    _, title = min(shown.items())
    return set(title), [" ".join(texts) for _, texts in sorted(shown.items())[1:]]


PROGRAM = """
import sys, time
from rich.console import Console
console = Console(stderr=True, highlight=False)
with console.status("it works on <this> & that"):
    time.sleep(1.5)
console.print("[green]done[/], after a while")
print('{"answer": 42}')
"""


def test_a_program_is_filmed_as_its_terminal_showed_it() -> None:
    recorded, output = film([sys.executable, "-c", PROGRAM])
    assert json.loads(output) == {"answer": 42}
    picture = draw_film(recorded, "make that")
    moments = [visible(picture, recorded.seconds * step / 20)[1] for step in range(20)]
    assert any("it works on <this> & that" in line for lines in moments for line in lines)
    end = ({"$ make that", f"{int(recorded.seconds)} s"}, ["done , after a while"])  # the status is gone
    assert visible(picture) == visible(picture, recorded.seconds + HOLD_S / 2) == end


def test_columns_of_a_table_stay_where_they_are() -> None:
    picture = draw_film(Film([(0.0, ["left      right"])], seconds=1.0), "x")
    (text,) = [text for text in ElementTree.fromstring(picture).iter(f"{SVG}text") if "left" in (text.text or "")]
    assert text.text == "left" + 6 * "\N{NO-BREAK SPACE}" + "right"  # ordinary spaces would be joined


def test_lines_come_and_go_at_their_seconds() -> None:
    recorded = Film([(0.0, ["first"]), (2.0, ["", "second"]), (5.0, ["third", "second"])], seconds=6.0)
    assert list(recorded.shots()) == [
        (0, "first", 0.0, 2.0),
        (0, "third", 5.0, 6.0 + HOLD_S),
        (1, "second", 2.0, 6.0 + HOLD_S),
    ]
    picture = draw_film(recorded, "x")
    for at, lines in {1.5: ["first"], 3.5: ["second"], 5.5: ["third", "second"], 15: ["third", "second"]}.items():
        assert visible(picture, at) == ({"$ x", f"{min(int(at), 6)} s"}, lines)


def test_a_screen_rewrites_its_last_lines_as_rich_does() -> None:
    screen = Screen()
    screen.feed("a\nb\nc")
    screen.feed("\r\x1b[2K\x1b[1A\x1b[2KB\nC\n\x1b[?25h")
    assert screen.lines == ["a", "B", "C", ""]
    with pytest.raises(ValueError, match=r"got '\\x1b\[7C'; allowed: "):
        screen.feed("\x1b[7C")


def test_a_program_that_fails_is_not_drawn() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        film([sys.executable, "-c", "raise SystemExit(3)"])


def test_the_committed_picture_is_of_the_committed_run() -> None:
    figures = json.loads((ROOT / "docs" / "results" / "demo-watched.json").read_text(encoding="utf-8"))
    path = ROOT / "docs" / "demo.svg"
    picture = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 300_000 and "<script" not in picture and picture.count("http") == 1
    title, lines = visible(picture)
    assert title == {"$ make demo", f"{int(figures['seconds'])} s"}
    shown = "\n".join(lines)
    named = [figures["prefix_tokens"], figures["pool_slots"], figures["pressing_tokens"]]
    columns = [*figures["dial"], figures["complete"]]
    named += [each["slots"] for each in columns]
    assert [number for number in named if f"{number:,}" not in shown] == []
    right = [f"{each['right_answers']} of {figures['answers']}" for each in columns]
    assert re.search(r"^right answers\s+" + r"\s+".join(right), shown, re.MULTILINE)
