"""Prompts: prose that goes on, and prose with facts whose question ends the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from kvevict_quality.corpus import prose
from kvevict_quality.sample import Prompts
from kvevict_quality.tasks import make_sample
from torch import Tensor

CONTINUATION = 128
LICENCE = Path(__file__).resolve().parents[3] / "LICENSE"


@dataclass(frozen=True)
class Text:
    """A prompt and what follows it.

    Attributes:
        prompt: [1, num_tokens], int64.
        continuation: [num_tokens], int64.
    """

    prompt: Tensor
    continuation: Tensor


def running_texts(prompts: Prompts, num_tokens: int) -> list[Text]:
    """The repository's prose, cut into pieces that share no token."""
    blocks = [*prose(), LICENCE.read_text(encoding="utf-8")]
    ids, size = prompts.encode("\n\n".join(blocks)), num_tokens + CONTINUATION
    pieces = [torch.tensor(ids[start : start + size]) for start in range(0, len(ids) - size + 1, size)]
    return [Text(piece[None, :num_tokens], piece[num_tokens:]) for piece in pieces]


def question_at_the_end(prompts: Prompts, num_tokens: int, index: int) -> Text:
    """Prose with six telephone numbers and the question for one; its answer follows."""
    sample = make_sample("needle-multi-key", num_tokens, 7, index, prompts.count)
    question = sample.questions[index % len(sample.questions)]
    ids = prompts.context_ids(sample) + prompts.question_ids(sample, question)
    return Text(torch.tensor([ids]), torch.tensor(prompts.encode(f" {question.answers[0]}.")))
