"""The prompts of the comparison: prose of two kinds and a conversation, 320 to 1,300 tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]

_CHAT = (
    ("system", "You help the volunteers of a small town library. Answer in plain sentences."),
    (
        "user",
        "We are moving the library into the old railway station this spring. The main hall is long and has tall "
        "windows on the south side, the former ticket office is a small room with a counter, and the waiting room "
        "still has its benches and an iron stove that nobody has lit for thirty years. We have about nine thousand "
        "books, two thousand of them for children, a shelf of local newspapers bound by year, and a piano that "
        "somebody gave us and nobody wants to carry. Where should everything go?",
    ),
    (
        "assistant",
        "I would put the children's books into the waiting room, because the benches are already there and a closed "
        "door keeps the noise in. The stove needs a guard rail even if it stays cold. The long hall suits the other "
        "seven thousand books, but keep the shelves away from the southern windows: sunlight fades the spines within "
        "two summers, so use that side for reading tables. The ticket office with its counter is made for lending "
        "and returning. The bound newspapers should lie flat in the driest room you have, away from the stove and "
        "from outer walls. The piano can stand at the far end of the hall, where it can be rolled out for readings.",
    ),
    (
        "user",
        "Thank you. The roof over the far end of the hall leaked last winter, and the mayor says that the repair will "
        "only be done in June, while we have to leave the old building by the end of April. Also, Mrs. Okafor, who "
        "looks after the newspapers, cannot climb stairs, and the only dry room is the signal room on the upper floor. "
        "There are eleven of us, four with cars, and a farmer has offered a trailer for two Saturdays.",
    ),
    (
        "assistant",
        "Then leave the far end of the hall empty until the roof is done, and set the shelves close together in the "
        "near half for two months; it will be crowded, but dry. The piano can wait in the ticket office, which is "
        "large enough if the counter flap stays up. For the newspapers I would line one inner wall of the waiting "
        "room with a metal cabinet and a small dehumidifier, so that Mrs. Okafor can reach them without stairs. Use "
        "the first Saturday and the trailer for shelves and furniture, the second for books. Pack the books in the "
        "order in which they stand and write the shelf number on each box.",
    ),
    (
        "user",
        "One more thing: how many boxes will we need, and how should the eleven of us split up on the second Saturday?",
    ),
)


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        name: in reports.
        source: what the text is.
        num_tokens: cut to this many; None = the whole of it.
        messages: of a conversation; rendered with the model's chat template, with the generation prompt.
        path: of a text file.
    """

    name: str
    source: str
    num_tokens: int | None = None
    messages: tuple[tuple[str, str], ...] = ()
    path: Path | None = None


_ALICE = "Carroll, Alice's Adventures in Wonderland, chapter 1 (public domain)"

PROMPTS = (
    Prompt("alice-320", _ALICE, 320, path=_HERE / "alice.txt"),
    Prompt("chat", "a conversation of three turns, chat template", messages=_CHAT),
    Prompt("licence-777", "the Apache License 2.0", 777, path=_ROOT / "LICENSE"),
    Prompt("alice-1300", _ALICE, 1300, path=_HERE / "alice.txt"),
)
