"""One context with its questions, as text and as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MARK = "<<<{}>>>"
#: Index of the context whose questions serve as samples; no measured context has it.
SAMPLES_INDEX = 1_000_000


@dataclass(frozen=True)
class Question:
    """One question about a context.

    Attributes:
        text: what the user asks.
        lead: words put into the assistant's mouth, which it goes on from.
        answers: values; the score is the share of them that the output contains (any case), as in RULER.
        max_new_tokens: length of the answer.
        variants: other forms of the answer, each of which counts as it.

    ValueError: variants, and not exactly one answer.
    """

    text: str
    lead: str
    answers: tuple[str, ...]
    max_new_tokens: int
    variants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.variants and len(self.answers) != 1:
            raise ValueError(f"variants: got some for {len(self.answers)} answers; allowed: for one answer")

    def score(self, output: str) -> float:
        """Share of the values that the output contains."""
        text = output.lower()
        found = [any(form.lower() in text for form in (answer, *self.variants)) for answer in self.answers]
        return sum(found) / len(found)


@dataclass(frozen=True)
class Sample:
    """One context, compressed before its questions are known.

    Attributes:
        context: beginning of the last user message; may be empty if there is a history.
        questions: what follows; each alone, or turns of conversations.
        history: (user, assistant) exchanges before it.
        turns: number of consecutive questions that make one conversation; 1 = every question alone.
    """

    context: str
    questions: tuple[Question, ...]
    history: tuple[tuple[str, str], ...] = ()
    turns: int = 1

    @property
    def conversations(self) -> list[tuple[Question, ...]]:
        """The questions, in groups that are asked one after the other."""
        return [self.questions[i : i + self.turns] for i in range(0, len(self.questions), self.turns)]


class Prompts:
    """Turns samples into token ids with the model's own chat template; without one, messages are paragraphs.

    The pieces are tokenised apart, so the ids of a context do not depend on what is asked about it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        user, answer, second = (_MARK.format(name) for name in ("user", "answer", "second"))
        text = self._render([("user", user), ("assistant", answer), ("user", second)])
        rest, self._to_answer = text.split(second)
        self._next_turn = rest.split(answer)[1]

    def context_ids(self, sample: Sample) -> list[int]:
        """Token ids of ``context_text``."""
        return self.encode(self.context_text(sample))

    def context_text(self, sample: Sample) -> str:
        """Everything before the question."""
        mark = _MARK.format("question")
        messages = [m for user, answer in sample.history for m in (("user", user), ("assistant", answer))]
        return self._render([*messages, ("user", sample.context + mark)]).split(mark)[0]

    def question_text(self, sample: Sample, question: Question, turn: int = 0) -> str:
        """The question and the beginning of the answer, to follow the context (turn 0) or the previous answer."""
        before = self._next_turn if turn else "\n\n" if sample.context else ""
        return f"{before}{question.text}{self._to_answer}{question.lead}"

    def question_ids(self, sample: Sample, question: Question, turn: int = 0) -> list[int]:
        """Token ids of ``question_text``."""
        return self.encode(self.question_text(sample, question, turn))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def count(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self.encode(text))

    def _render(self, messages: Sequence[tuple[str, str]]) -> str:
        if self._tokenizer.chat_template is None:  # a base model: paragraphs behind BOS
            return "\n\n".join([(self._tokenizer.bos_token or "") + messages[0][1], *(m for _, m in messages[1:]), ""])
        chat = [{"role": role, "content": content} for role, content in messages]
        return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
