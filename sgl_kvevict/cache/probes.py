"""Token sequences that make a model attend to a prefix."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPEAT = "\n\nRepeat the sentences of the previous context in another order."
MIN_SENTENCE_TOKENS = 8
"""Shorter sentences (abbreviations, numbers, empty lines) are joined with the next one."""
MAX_SENTENCE_TOKENS = 64
"""Longer sentences are cut: lists and tables have none."""

_SENTENCE_ENDS = frozenset(".!?\n\u3002\uff01\uff1f")
_ORDER = 1
"""Seed of the sentences' order, the same on every rank."""
_MARK = "\x00"


class Probes:
    """Texts still to be appended to a prefix, pass by pass.

    Args:
        texts: token ids, none empty; one text per pass, or a part of it. Lazy: encoding many questions takes time.
        lead: token ids at the beginning of each pass.
        can_be_cut: whether a long text may go into several passes.
    """

    def __init__(self, texts: Iterable[list[int]], lead: Sequence[int] = (), *, can_be_cut: bool = False) -> None:
        self._rest = iter(texts)
        self._text = next(self._rest, None)
        self._lead = list(lead)
        self._can_be_cut = can_be_cut
        self._num_given = 0

    @property
    def is_empty(self) -> bool:
        """Whether all texts were read."""
        return self._text is None

    def next(self, num_tokens: int) -> list[int]:
        """The lead, and at most ``num_tokens`` (>= 1) of a text that can be cut; the same until :meth:`was_read`."""
        assert self._text is not None
        self._num_given = min(len(self._text), num_tokens) if self._can_be_cut else len(self._text)
        return [*self._lead, *self._text[: self._num_given]]

    def was_read(self) -> None:
        """The tokens that :meth:`next` returned last were prefilled."""
        assert self._text is not None
        self._text = self._text[self._num_given :] or next(self._rest, None)


def repetition_probes(tokenizer: PreTrainedTokenizerBase | None, tokens: Sequence[int]) -> Probes:
    """Ask for the prefix's sentences to be repeated, followed by that answer, part by part.

    Source: KVzip (arXiv 2505.23416), Sec. 3.2.
    Differs: sentences in another order. Repeating a text from its beginning needs only the token after the last one; a
        sentence out of order has to be looked up, like the answer to a question (docs/quality.md). Parts are shorter
        than KVzip's 2,000 tokens, because requests wait for a pass.

    Without a tokenizer sentences are unknown: the tokens (at least one) are repeated as they are.
    """
    if tokenizer is None:
        return Probes([list(tokens)], can_be_cut=True)
    ask = tokenizer.encode(REPEAT + assistant_turn(tokenizer), add_special_tokens=False)
    sentences = split_sentences(tokenizer, tokens)
    random.Random(_ORDER).shuffle(sentences)
    return Probes([list(itertools.chain.from_iterable(sentences))], ask, can_be_cut=True)


def split_sentences(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[list[int]]:
    """Cut ``tokens`` (at least one) after those that end a sentence or a line, and after ``MAX_SENTENCE_TOKENS``."""
    ends = {token for token in set(tokens) if not _SENTENCE_ENDS.isdisjoint(tokenizer.decode([token]))}
    sentences: list[list[int]] = [[]]
    for token in tokens:
        sentence = sentences[-1]
        if len(sentence) == MAX_SENTENCE_TOKENS or (len(sentence) >= MIN_SENTENCE_TOKENS and sentence[-1] in ends):
            sentence = []
            sentences.append(sentence)
        sentence.append(token)
    return sentences


def question_probes(tokenizer: PreTrainedTokenizerBase, questions: Sequence[str]) -> Iterator[list[int]]:
    """Yield questions as they will follow the prefix, each up to the beginning of its answer."""
    turn = assistant_turn(tokenizer)
    for question in questions:
        yield tokenizer.encode(question + turn, add_special_tokens=False)


def assistant_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """Text between a user's message and the answer; an empty line for models without a chat template."""
    if tokenizer.chat_template is None:
        return "\n\n"
    messages = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text).partition(_MARK)[2]
