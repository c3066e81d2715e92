"""Token sequences that make a model attend to what a prefix holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with"
NUM_CUE_TOKENS = 8
"""Last tokens of the previous part that tell the model where to go on."""

_MARK = "\x00"


def repetition_probes(
    tokenizer: PreTrainedTokenizerBase | None, tokens: Sequence[int], pass_tokens: int
) -> Iterator[list[int]]:
    """Ask for the tokens to be repeated, and give the answer away, part by part.

    Source: KVzip (arXiv 2505.23416), Sec. 3.2 and its released prompts.
    Differs: parts of ``pass_tokens``, by default shorter than KVzip's 2,000, because others wait for a pass.

    Args:
        tokenizer: the model's; None on a server without one: the tokens follow the prefix without any words.
        tokens: of the prefix.
        pass_tokens: tokens of the prefix in one probe.
    """
    if tokenizer is None:
        yield from (list(tokens[start : start + pass_tokens]) for start in range(0, len(tokens), pass_tokens))
        return
    turn = tokenizer.encode(assistant_turn(tokenizer), add_special_tokens=False)
    for start in range(0, len(tokens), pass_tokens):
        ask = tokenizer.encode(REPEAT_FROM if start else REPEAT, add_special_tokens=False)
        cue = list(tokens[max(start - NUM_CUE_TOKENS, 0) : start])
        yield [*ask, *cue, *turn, *tokens[start : start + pass_tokens]]


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
