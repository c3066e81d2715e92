"""The document, what is asked about it, and what counts as a right answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "data" / "station_handbook.txt"

_TASK = (
    "You are the guide of the Skerrin Point weather station. "
    "Answer questions about the handbook below in a few words.\n\n"
)


@dataclass(frozen=True)
class Question:
    """One question about the document.

    Attributes:
        text: what the user asks.
        expected: pieces of text; an answer that contains one of them (any case) is right.
        lead: words put into the assistant's mouth, which it goes on from; may be empty.
    """

    text: str
    expected: tuple[str, ...]
    lead: str = ""

    def is_right(self, answer: str) -> bool:
        """Whether ``answer`` holds one of the expected pieces, in any case."""
        return any(piece.lower() in answer.lower() for piece in self.expected)


#: Asked all at once, by the branches of one forked program. The words in the lead let a very small model
#: point at the place it read; the answer itself is never part of them. A lead ends where the
#: model's next word is clearly ahead of any other; else what is computed in the same batch could decide the answer.
BRANCH_QUESTIONS: Sequence[Question] = (
    Question(
        "Who is the keeper of the station?",
        ("Tomas Brandt",),
        "Five people live at Skerrin Point. The keeper of the station is",
    ),
    Question("Who is the captain of the Grey Heron?", ("Annika",), "The captain's name is"),
    Question(
        "What is the name of the goat?",
        ("Clover",),
        "The only animal that lives at the station is a goat named",
    ),
    Question(
        "Where does the drinking water come from?", ("western slope",), "Drinking water comes from a spring on the"
    ),
    Question("What do three long blasts mean?", ("come inside",), "Three long blasts mean that everybody must"),
    Question("What is the name of the jar?", ("Balthasar",), "The jar has a name, which is"),
    Question("Where do we meet in case of fire?", ("flagpole",), "The meeting point in case of fire is"),
    Question("What is the first recipe?", ("pancakes",), "The first recipe in the brown book is for"),
)

#: Asked one after the other in one conversation.
CHAT_QUESTIONS: Sequence[Question] = (
    Question("What is the name of the supply boat?", ("Grey Heron",)),
    Question("What is the call sign of the station?", ("Lantern Nine",)),
    Question("Where is the spare key of the pantry?", ("clay pot", "rosemary")),
    Question("Where are the journals of former years kept?", ("iron chest",)),
)


def system_prompt() -> str:
    """The shared system message: a short task, then the whole document."""
    return _TASK + DOCUMENT.read_text(encoding="utf-8").strip()
