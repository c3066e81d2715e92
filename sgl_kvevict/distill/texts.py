"""Training texts from the Python installation (manual, library code, tables), or from a folder.

After a text the model reads its sentences in another order, so that it attends to all of it.
"""

from __future__ import annotations

import importlib.util
import itertools
import mimetypes
import random
import unicodedata
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sgl_kvevict.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["prose", "code", "tables"]
KINDS: tuple[Kind, ...] = ("prose", "code", "tables")

MODULES = (
    *("argparse", "statistics", "textwrap", "csv", "fractions", "heapq", "shutil", "tarfile", "zipfile", "calendar"),
    *("configparser", "difflib", "ftplib", "imaplib", "optparse", "pdb", "pickle", "smtplib", "tokenize", "uuid"),
)
_CHARACTERS = (0x2190, 0x2300, 0x1F300, 0x370, 0x4E0, 0x13A0)


NUM_TEXTS = 16
"""Texts that scores are learned from; one more tries them. A fixed number, so that ranks and schedulers that step
together take the same steps."""
LENGTHS = (4000, 8000, 16000, 2000)
"""Characters of a text, in turn: weights learned from short texts only have less recall in long ones."""


def passages_of(folder: str | None) -> list[str]:
    """``NUM_TEXTS`` + 1 texts of a folder (``score_texts``); None: of the Python installation.

    ConfigError: a file is not readable as UTF-8, or there are too few texts.
    """
    lengths = list(itertools.islice(itertools.cycle(LENGTHS), NUM_TEXTS + 1))
    if folder is None:
        return training_texts(lengths)
    try:
        texts = texts_of_folder(Path(folder), lengths)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"score_texts: {folder!r} cannot be read: {error}") from error
    found = [text for text in texts if len(text) >= min(LENGTHS)]
    if len(found) < NUM_TEXTS + 1:
        raise ConfigError(
            f"score_texts: got {len(found)} passages of {min(LENGTHS):,} characters or more in {folder!r}; allowed: "
            f"{NUM_TEXTS + 1} or more (UTF-8 files)"
        )
    return found


def training_texts(lengths: Sequence[int], kinds: Sequence[Kind] = KINDS) -> list[str]:
    """One text per length (characters), cycling through the kinds; passages repeat only when all are used."""
    pools = {kind: itertools.cycle(_blocks(kind)) for kind in kinds}
    return [_take(pools[kind], length) for length, kind in zip(lengths, itertools.cycle(kinds), strict=False)]


def texts_of_folder(folder: Path, lengths: Sequence[int]) -> list[str]:
    """Passages of ``lengths`` characters: the first of each file below the folder, by name, then the second ones.

    The end of a file gives a shorter passage; fewer are returned if all text is used. OSError or UnicodeDecodeError if
    a file cannot be read as UTF-8.
    """
    files = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*")) if path.is_file()]
    rests = deque(text for text in files if text)
    passages: list[str] = []
    for length in lengths:
        if not rests:
            break
        text = rests.popleft()
        passages.append(text[:length])
        if len(text) > length:
            # To the end of the queue: each file gives a passage before one gives its second.
            rests.append(text[length:])
    return passages


def _take(blocks: Iterator[str], length: int) -> str:
    taken: list[str] = []
    while sum(map(len, taken)) < length:
        taken.append(next(blocks))
    return "".join(taken)[:length]


def _blocks(kind: Kind) -> list[str]:
    """Pieces of 6,000 characters (or small tables), in a fixed order that mixes distant ones."""
    if kind == "tables":
        return [_characters(first) if i % 2 else _types(i) for i, first in enumerate(_CHARACTERS * 2)]
    if kind == "prose":
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
    else:
        specs = map(importlib.util.find_spec, MODULES)
        paths = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
        text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    pages = [text[start : start + 6000] for start in range(0, len(text), 6000)]
    # Neighbouring pages treat one subject, and a text is to have several.
    return [page for first in range(7) for page in pages[first::7]]


def _characters(first: int) -> str:
    named = ((point, unicodedata.name(chr(point), "")) for point in range(first, first + 120))
    rows = (f"| U+{point:04X} | {name.capitalize()} | {unicodedata.category(chr(point))} |" for point, name in named)
    return "| code | name | category |\n|---|---|---|\n" + "\n".join(rows) + "\n\n"


def _types(part: int) -> str:
    known = sorted(mimetypes.MimeTypes().types_map[True].items())[part * 12 : part * 12 + 24]
    rows = (f'  {{"suffix": "{suffix}", "type": "{kind}"}}' for suffix, kind in known)
    return "[\n" + ",\n".join(rows) + "\n]\n\n"


REPEAT = "\n\nRepeat the sentences of the previous context in another order."
MIN_SENTENCE_TOKENS = 8
"""Shorter sentences (abbreviations, numbers, empty lines) are joined with the next one."""
MAX_SENTENCE_TOKENS = 64
"""Longer sentences are cut: lists and tables have none."""

_SENTENCE_ENDS = frozenset(".!?\n\u3002\uff01\uff1f")
_ORDER = 1
"""Seed of the sentences' order, the same on every rank."""
_MARK = "\x00"


def request_to_repeat(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that ask for the sentences of a text, up to the beginning of the answer."""
    return list(tokenizer.encode(REPEAT + assistant_turn(tokenizer), add_special_tokens=False))


def repetitions(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], part_tokens: int) -> list[list[int]]:
    """Token ids to read after a text: the request to repeat it, each time with a part of the answer.

    ``tokens``: of the text, at least one. ``part_tokens``: of a part, at most.

    Source: KVzip (arXiv 2505.23416), Sec. 3.2.
    Differs: sentences in another order. Repeating a text from its beginning needs only the token after the last one; a
        sentence out of order has to be looked up, like the answer to a question (docs/quality.md).
    """
    ask = request_to_repeat(tokenizer)
    sentences = split_sentences(tokenizer, tokens)
    random.Random(_ORDER).shuffle(sentences)
    answer = list(itertools.chain.from_iterable(sentences))
    return [[*ask, *answer[start : start + part_tokens]] for start in range(0, len(answer), part_tokens)]


def split_sentences(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[list[int]]:
    """Cut ``tokens`` (at least one) after those that end a sentence or a line, and after ``MAX_SENTENCE_TOKENS``."""
    # Each kind of token is decoded once: a long text has far fewer kinds than tokens.
    ends = {token for token in set(tokens) if not _SENTENCE_ENDS.isdisjoint(tokenizer.decode([token]))}
    sentences: list[list[int]] = [[]]
    for token in tokens:
        sentence = sentences[-1]
        if len(sentence) == MAX_SENTENCE_TOKENS or (len(sentence) >= MIN_SENTENCE_TOKENS and sentence[-1] in ends):
            sentence = []
            sentences.append(sentence)
        sentence.append(token)
    return sentences


def assistant_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """Text between a user's message and the answer; an empty line for models without a chat template."""
    if tokenizer.chat_template is None:
        return "\n\n"
    messages = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text).partition(_MARK)[2]
