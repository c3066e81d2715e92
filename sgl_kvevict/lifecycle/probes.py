"""Token sequences that make a model attend to what a prefix holds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
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


def repetition_probes(
    tokenizer: PreTrainedTokenizerBase | None, tokens: Sequence[int], pass_tokens: int
) -> Iterator[list[int]]:
    """Ask for the sentences to be repeated, and give the answer away, part by part.

    Source: KVzip (arXiv 2505.23416), Sec. 3.2.
    Differs: sentences in another order. Who repeats a text from its beginning needs to find only the token after the
        one just said; who begins a sentence anew has to look it up, and so does who answers a question
        (docs/quality.md). And parts of ``pass_tokens``, by default shorter than KVzip's 2,000, because others wait
        for a pass.

    Args:
        tokenizer: the model's; None on a server without one, which cannot tell words or sentences: the tokens follow
            the prefix as they are.
        tokens: of the prefix.
        pass_tokens: tokens of the prefix in one probe.
    """
    ask: list[int] = []
    if tokenizer is not None:
        ask = tokenizer.encode(REPEAT + assistant_turn(tokenizer), add_special_tokens=False)
        sentences = split_sentences(tokenizer, tokens)
        random.Random(_ORDER).shuffle(sentences)
        tokens = list(itertools.chain.from_iterable(sentences))
    for start in range(0, len(tokens), pass_tokens):
        yield [*ask, *tokens[start : start + pass_tokens]]


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
