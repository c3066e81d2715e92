"""Results: one row for each (system, budget, task, length), in one CSV file that later runs add to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvevict_tools.csv_rows import read_records, write_records

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results" / "quality" / "results.csv"
AWARE_RESULTS = RESULTS.with_name("aware.csv")
"""The same rows for prompts that end with their question."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        engine: "kvevict" (the server with this plugin) or "kvpress".
        policy: a policy's or a press's name; "full" keeps everything (kvevict: the policy "none").
        options: of the policy, "name=value" with spaces between them; may be empty.
        budget: as configured (kvpress: the share that was asked for); 1.0 for "full".
        task: a task's name, or "fidelity".
        tokens: nominal length of a context.
        contexts, questions: how many were measured (fidelity: questions are positions).
        score: mean over the questions of the share of right values; fidelity: top-1 agreement.
        kl: fidelity only: mean Kullback-Leibler divergence from the full cache over a continuation, nats.
        context_tokens, slots: means over the contexts: logical tokens, and token slots held for them (all entries
            of all layers and heads count). Aware: of the prompts, question included.
        prepare_s, answer_s: seconds per context until it was compressed, and for all its questions. Aware: 0, and all.
        model, dtype, seed: of the run.
        versions: of the engine.
        commit: of this repository, ``+`` if files were changed.
        exact: squad only: share of exact matches; its score is F1.
        nll: fidelity only: mean negative log-likelihood of the text itself, nats a token.
        scores: of each question, or of each passage (fidelity), in order, with spaces between them.
    """

    engine: str
    policy: str
    options: str
    budget: float
    task: str
    tokens: int
    contexts: int
    questions: int
    score: float
    kl: float | None
    context_tokens: float
    slots: float
    prepare_s: float
    answer_s: float
    model: str
    dtype: str
    seed: int
    versions: str
    commit: str
    exact: float | None = None
    nll: float | None = None
    scores: str = ""

    @property
    def key(self) -> tuple[str, str, str, float, str, int, str, int]:
        """What identifies a measurement; another one with the same key takes its place."""
        return self.engine, self.policy, self.options, self.budget, self.task, self.tokens, self.model, self.seed

    @property
    def kept_share(self) -> float:
        """Token slots held over logical tokens."""
        return self.slots / self.context_tokens

    @property
    def label(self) -> str:
        """Policy with its options, for tables."""
        return f"{self.policy} {self.options}".strip()


def read_rows(path: Path) -> list[Row]:
    """All rows of a file, also of an older one, which lacks the last columns; none if it does not exist."""
    return read_records(path, Row)


def merge_rows(path: Path, new: Sequence[Row]) -> None:
    """Add rows to a file, in one rename; a row takes the place of one with the same key."""
    rows = {row.key: row for row in (*read_rows(path), *new)}
    scratch = path.with_suffix(f".{os.getpid()}.part")
    write_records(scratch, Row, sorted(rows.values(), key=lambda row: row.key))
    scratch.rename(path)
