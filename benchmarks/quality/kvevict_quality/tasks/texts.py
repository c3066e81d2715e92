"""Questions that nobody here wrote: SQuAD, fields of the World Factbook, Perl's FAQ, lines of Python's library."""

from __future__ import annotations

import collections
import functools
import random
import re
import string
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvevict_quality import archives
from kvevict_quality.corpus import CountTokens
from kvevict_quality.sample import Question, Sample

_ASKED = 8
_BREAK_TOKENS = 2


@dataclass(frozen=True)
class ShortAnswer(Question):
    """A question of SQuAD; ``variants`` are the other right answers. The output counts up to a quotation mark."""

    def score(self, output: str) -> float:
        """F1 of the words that the output shares with the right answer that it is closest to."""
        return max(self._f1(_words(_quoted(output)), _words(answer)) for answer in (*self.answers, *self.variants))

    def exact(self, output: str) -> float:
        """1 if the output is a right answer, apart from case, punctuation and articles."""
        return float(any(_words(_quoted(output)) == _words(answer) for answer in (*self.answers, *self.variants)))

    @staticmethod
    def _f1(output: list[str], answer: list[str]) -> float:
        common = (collections.Counter(output) & collections.Counter(answer)).total()
        return 2 * common / (len(output) + len(answer)) if common else float(output == answer)


def _quoted(output: str) -> str:
    return re.split(r'["\n]', output)[0]


def _words(text: str) -> list[str]:
    """Words as SQuAD's ``evaluate-v1.1.py`` compares them."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def squad(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Paragraphs drawn at random, and questions about them."""
    paragraphs = rng.sample(_paragraphs(), len(_paragraphs()))
    chosen: list[dict[str, Any]] = []
    for paragraph in paragraphs:
        num_tokens -= count(paragraph["context"]) + _BREAK_TOKENS
        if num_tokens < 0:
            break
        chosen.append(paragraph)
    if not chosen:
        raise ValueError("num_tokens: too few for one paragraph")
    asked = [question for paragraph in chosen for question in paragraph["qas"]]
    questions = (
        ShortAnswer(
            given["question"],
            'According to the text, the answer is "',
            (given["answers"][0]["text"],),
            24,
            tuple(answer["text"] for answer in given["answers"][1:]),
        )
        for given in rng.sample(asked, min(_ASKED, len(asked)))
    )
    return Sample("\n\n".join(paragraph["context"] for paragraph in chosen), tuple(questions))


@functools.cache
def _paragraphs() -> tuple[dict[str, Any], ...]:
    return archives.squad_paragraphs()


def factbook(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Consecutive fields of a country's profile; numbers that stand there once are asked for."""
    profiles = _profiles()
    for name in rng.sample(sorted(profiles), len(profiles)):
        fields = profiles[name]
        lengths = [count(f"{label}: {text}\n") for label, text in fields]
        room, first = num_tokens, rng.randrange(len(fields) // 2 if sum(lengths) > 2 * num_tokens else 1)
        end = first
        while end < len(fields) and room >= lengths[end]:
            room -= lengths[end]
            end += 1
        context = "\n".join(f"{label}: {text}" for label, text in fields[first:end])
        asked = [(label, value) for label, text in fields[first:end] if (value := _number(text, context))]
        if room < num_tokens // 8 and len(asked) >= _ASKED:
            break
    else:
        raise ValueError(f"num_tokens: got {num_tokens}; allowed: what one profile fills")
    questions = (
        Question(f"What is written here for {label}?", f"{label}:", (value,), 16)
        for label, value in rng.sample(asked, _ASKED)
    )
    return Sample(context, tuple(questions))


def _number(text: str, context: str) -> str:
    """The number that a field begins with, if it is one of several digits and the context has it once; else empty."""
    found = re.match(r"\$?(\d[\d,.]*\d)", text)
    return found[1] if found and len(re.findall(rf"(?<![\d,.]){re.escape(found[1])}(?![\d])", context)) == 1 else ""


@functools.cache
def _profiles() -> dict[str, tuple[tuple[str, str], ...]]:
    """(label, text) of all fields of each country, in order; labels of two fields that are alike are left out."""
    profiles = {}
    for name, profile in archives.country_profiles().items():
        fields = list(_fields(profile, ()))
        times = collections.Counter(label for label, _ in fields)
        profiles[name] = tuple((label, text) for label, text in fields if times[label] == 1)
    return profiles


def _fields(node: dict[str, Any], above: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name, inner in node.items():
        if isinstance(inner, dict):
            path = (*above, name)
            if isinstance(inner.get("text"), str):
                yield ", ".join(path[1:] or path), inner["text"].replace("\n", " ").strip()
            yield from _fields(inner, path)


def perlfaq(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """Entries of Perl's FAQ, drawn at random; a question is a heading, its answer the sentence below it."""
    chosen: list[tuple[str, str]] = []
    for heading, body in rng.sample(_faq(), len(_faq())):
        length = count(f"{heading}\n{body}\n\n") + _BREAK_TOKENS
        if length <= min(num_tokens, 1000):
            num_tokens -= length
            chosen.append((heading, body))
    questions = (
        ShortAnswer(
            f'Quote the sentence that follows the heading "{heading}"',
            f"{heading}\n",
            (_first_sentence(body),),
            64,
        )
        for heading, body in rng.sample(chosen, min(_ASKED, len(chosen)))
    )
    return Sample("\n\n".join(f"{heading}\n{body}" for heading, body in chosen), tuple(questions))


def _first_sentence(body: str) -> str:
    """The sentence that a text begins with, if it has 6 to 40 words and no quotation mark; else empty."""
    sentence = " ".join(re.split(r"(?<=[.!?:])\s", body, maxsplit=1)[0].split())
    return sentence if 6 <= len(sentence.split()) <= 40 and '"' not in sentence else ""


@functools.cache
def _faq() -> tuple[tuple[str, str], ...]:
    """(heading, text) of the entries that begin with a sentence to ask for, without POD's markup."""
    entries = (entry for pod in archives.perl_faq() for entry in _entries(pod))
    return tuple((heading, body) for heading, body in entries if _first_sentence(body))


def _entries(pod: str) -> Iterator[tuple[str, str]]:
    text = re.sub(r"X<[^<>]*>", "", pod)
    text = re.sub(r"C<<+ (.*?) >>+", r"\1", text)
    text = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda link: link[1] or link[2], text)
    text = re.sub(r"[BCFIS]<([^<>]*)>", r"\1", text)
    text = text.replace("E<lt>", "<").replace("E<gt>", ">")
    for heading, body in re.findall(r"^=head2 (.+?)\n\n(.*?)(?=^=|\Z)", text, re.DOTALL | re.MULTILINE):
        yield " ".join(heading.split()), re.sub(r"\A\s*\((?:partly )?contributed by[^)]*\)", "", body).strip()


def completion(rng: random.Random, num_tokens: int, count: CountTokens) -> Sample:
    """The beginning of a module; the questions go on with more and more of its lines, and ask for the next one."""
    for path in rng.sample(_modules(), len(_modules())):
        lines = path.read_text(encoding="utf-8").splitlines()
        room, cut = num_tokens - 16, 0
        while cut < len(lines) and (room := room - count(f"{lines[cut]}\n")) >= 0:
            cut += 1
        places = [i for i in range(cut + 2, min(len(lines), cut + 64)) if len(lines[i].strip()) > 8]
        asked = sorted({lines[i].strip(): i for i in places}.values())[:_ASKED]
        if len(asked) == _ASKED:
            break
    else:
        raise ValueError(f"num_tokens: got {num_tokens}; allowed: what one module has")
    questions = (
        Question(
            "\n".join([*lines[cut:place], "```", "Write the line that follows, and nothing else."]),
            "```python\n" + re.match(r"\s*", lines[place])[0],  # type: ignore[index]
            (lines[place].strip(),),
            40,
        )
        for place in asked
    )
    return Sample("```python\n" + "\n".join(lines[:cut]), tuple(questions))


@functools.cache
def _modules() -> tuple[Path, ...]:
    """Modules of Python's library that are long enough for any context of 8,192 tokens or fewer."""
    folder = Path(sysconfig.get_path("stdlib"))
    return tuple(path for path in sorted(folder.glob("*.py")) if path.stat().st_size > 50_000)
