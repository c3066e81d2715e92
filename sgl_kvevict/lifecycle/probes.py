"""Token sequences that make a model attend to what a prefix holds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPEAT = "\n\nRepeat the sentences of the previous context in another order."
MIN_SENTENCE_TOKENS = 8
"""What is shorter goes on into the next sentence: an abbreviation, a number, an empty line."""
MAX_SENTENCE_TOKENS = 64
"""What is longer is cut: lists and tables have no sentences."""

_SENTENCE_ENDS = frozenset(".!?\n\u3002\uff01\uff1f")
_ORDER = 1
"""Seed of the order of sentences: the same on every rank."""
_MARK = "\x00"


class Probes:
    """What is still to be appended to a prefix, pass by pass.

    Args:
        texts: token ids, none of them empty; one text a pass, or as much of it as a pass may have. Each is asked for
            when its turn comes: to encode many questions takes time.
        lead: token ids that each pass begins with.
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
        """Everything was read."""
        return self._text is None

    def next(self, num_tokens: int) -> list[int]:
        """What the next pass appends; until :meth:`was_read` is called it begins at the same place.

        Args:
            num_tokens: at most so many of a text that can be cut, the lead left out; >= 1.
        """
        assert self._text is not None
        self._num_given = min(len(self._text), num_tokens) if self._can_be_cut else len(self._text)
        return [*self._lead, *self._text[: self._num_given]]

    def was_read(self) -> None:
        """What :meth:`next` returned last was read to its end."""
        assert self._text is not None
        self._text = self._text[self._num_given :] or next(self._rest, None)


def repetition_probes(tokenizer: PreTrainedTokenizerBase | None, tokens: Sequence[int]) -> Probes:
    """Ask for the sentences to be repeated, and give the answer away, part by part.

    Source: KVzip (arXiv 2505.23416), Sec. 3.2.
    Differs: sentences in another order. Repeating a text from its beginning needs only the token after the last one; a
        sentence out of order has to be looked up, as the answer to a question has (docs/quality.md). Parts are shorter
        than KVzip's 2,000 tokens, because requests wait for a pass.

    Args:
        tokenizer: the model's; None on a server without one, which cannot tell words or sentences: the tokens follow
            the prefix as they are.
        tokens: of the prefix, at least one.
    """
    if tokenizer is None:
        return Probes([list(tokens)], can_be_cut=True)
    ask = tokenizer.encode(REPEAT + assistant_turn(tokenizer), add_special_tokens=False)
    sentences = split_sentences(tokenizer, tokens)
    random.Random(_ORDER).shuffle(sentences)
    return Probes([list(itertools.chain.from_iterable(sentences))], ask, can_be_cut=True)


def split_sentences(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[list[int]]:
    """Cut after tokens that end a sentence or a line; no sentence is longer than ``MAX_SENTENCE_TOKENS``.

    Args:
        tokenizer: the model's.
        tokens: at least one.
    """
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
    """Questions as they will follow the prefix, each up to where the answer begins.

    Args:
        tokenizer: the model's.
        questions: texts without any template.
    """
    turn = assistant_turn(tokenizer)
    for question in questions:
        yield tokenizer.encode(question + turn, add_special_tokens=False)


def assistant_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what ends a user's message and begins the answer; an empty line for models without a chat template."""
    if tokenizer.chat_template is None:
        return "\n\n"
    messages = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text).partition(_MARK)[2]
