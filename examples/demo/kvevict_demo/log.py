"""The station's log: as many days as somebody needs; one of them says how a whale was named."""

from __future__ import annotations

import random
from datetime import date, timedelta

from .questions import Question

_FIRST_DAY = date(2031, 3, 1)
_WINDS = ("south-west", "north", "west by north", "east", "south", "north-east")
_SKIES = ("fog until noon", "showers", "a clear night", "low cloud", "sleet", "long swell from the open sea")
_WORK = (
    "Tomas oiled the hinges of the boathouse.",
    "Ines copied the barograph sheets.",
    "The Grey Heron brought flour and two letters.",
    "We painted the railing of the gallery.",
    "The goat ate the line of the signal flag.",
    "A seal slept on the landing stage until the evening.",
    "The generator ran for three hours.",
    "Nobody went out; we mended socks and played draughts.",
)

LOG_QUESTION = Question("What did we name the whale?", ("Ophelia",), "A whale came into the bay; we named it")
_HIDDEN = "A whale came into the bay; we named it Ophelia."


def log_text(num_days: int) -> str:
    """A system message of so many days, in the demo model's chat template."""
    chosen = random.Random(0)
    days = []
    for number in range(num_days):
        day = (
            f"{_FIRST_DAY + timedelta(number):%-d %B}. Wind {chosen.choice(_WINDS)}, {chosen.randint(2, 9)} Beaufort; "
        )
        days.append(f"{day}{chosen.choice(_SKIES)}. {chosen.choice(_WORK)}")
    days[num_days // 8] += f" {_HIDDEN}"
    return f"<|im_start|>system\nYou answer questions about the log of the station.\n\n{chr(10).join(days)}<|im_end|>\n"
