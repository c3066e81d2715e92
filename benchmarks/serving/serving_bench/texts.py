"""Prompts as token ids, from real prose."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from kvevict_quality.archives import speeches
from tokenizers import Tokenizer

from serving_bench.results import ROOT

_PROSE = ROOT / "examples" / "data" / "station_handbook.txt"
_SPEECHES = (-1, -70, -120, -180)
"""Counted from the latest."""
_TURN = "<|im_end|>\n<|im_start|>user\nQuestion {number}: describe the station.<|im_end|>\n<|im_start|>assistant\n"


@cache
def _tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@cache
def _prose(model: Path) -> tuple[int, ...]:
    return tuple(tokens_of(model, _PROSE.read_text(encoding="utf-8")))


def tokens_of(model: Path, text: str) -> list[int]:
    """The token ids of a text."""
    ids: list[int] = _tokenizer(model).encode(text).ids
    return ids


def document(model: Path, number: int, num_tokens: int) -> list[int]:
    """Exactly ``num_tokens`` tokens of prose; documents of different numbers differ from the first words on."""
    ids = tokens_of(model, f"Document {number}. ")
    prose = _prose(model)
    start = (number * 997) % len(prose)
    while len(ids) < num_tokens:
        ids.extend(prose[start:])
        start = 0
    return ids[:num_tokens]


def question(model: Path, number: int) -> list[int]:
    """A short question as a chat turn; about 25 tokens."""
    return tokens_of(model, _TURN.format(number=number))


def chosen_speeches() -> list[str]:
    """State of the Union addresses of four times."""
    found = speeches()
    return [found[place] for place in _SPEECHES]
