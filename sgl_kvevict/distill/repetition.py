"""What a model reads after a text so that it attends to all of it: the text's sentences, in another order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
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
