"""Results of several models side by side, with paired standard errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from kvevict_quality.rows import Row
from kvevict_quality.systems import FULL
from kvevict_quality.tasks import FIDELITY_TASKS, NEEDLE_TASKS
from sgl_kvevict.config import KVEvictConfig

DEFAULT_POLICY = KVEvictConfig().policy

_ASKED = ("needles", "squad", "factbook", "reading", "table")
GOALS = {
    **{(task, 1024, 0.2): 0.97 for task in _ASKED},
    **{(task, 1024, 0.1): 0.80 if task == "table" else 0.92 for task in _ASKED},
    **{(task, 4096, 0.2): 0.95 for task in ("squad", "factbook")},
}
"""Least share of the full cache's score that the default should keep, by task, length and budget."""

PEERS = " (kvpress)"
"""Behind the names of kvpress' presses."""

_Scores = dict[tuple[str, int, int], float]
"""By task, seed and number of the question."""
_Systems = dict[tuple[float, str], _Scores]
"""By budget (negative) and label."""


def paired_share(full: Sequence[float], scores: Sequence[float]) -> tuple[float, float]:
    """Share of the full cache's score, and its standard error, from the scores of the same questions.

    ValueError: not the same questions, or the full cache answers none.
    """
    if len(full) != len(scores) or not sum(full):
        raise ValueError(f"scores: got {len(scores)} beside {len(full)} of the full cache; allowed: as many, not all 0")
    share = sum(scores) / sum(full)
    squares = sum((score - share * reference) ** 2 for score, reference in zip(scores, full, strict=True))
    return share, math.sqrt(squares) / sum(full)


def _share(by_system: _Systems, system: tuple[float, str]) -> tuple[float, float] | None:
    """A system's share of the full cache's score over the questions that it was asked, and the error; None: none."""
    scores = by_system.get(system)
    if not scores:
        return None
    full = by_system[-1.0, f"{FULL}{PEERS}" if system[1].endswith(PEERS) else FULL]
    return paired_share([full[question] for question in scores], [*scores.values()])


def _name(row: Row) -> str:
    """Of a system; presses of kvpress are compared with their own full cache."""
    return f"{row.label}{PEERS}" if row.engine == "kvpress" else row.label


def _cell(share: tuple[float, float] | None) -> str:
    return "" if share is None else f"{100 * share[0]:.0f} ± {100 * share[1]:.0f} %"


def _by_task(rows: Sequence[Row]) -> dict[tuple[str, int, str], _Systems]:
    """Scores of questions by model, length and task; needle tasks count together."""
    found: dict[tuple[str, int, str], _Systems] = {}
    for row in rows:
        if row.task in FIDELITY_TASKS:
            continue
        task = "needles" if row.task in NEEDLE_TASKS else row.task
        scores = found.setdefault((row.model, row.tokens, task), {}).setdefault((-row.budget, _name(row)), {})
        scores |= {(row.task, row.seed, i): float(score) for i, score in enumerate(row.scores.split())}
    return dict(sorted(found.items()))


def _table(lines: Sequence[Sequence[str]], num_names: int) -> str:
    """Markdown of a head and its lines; columns after the first ``num_names`` are figures."""
    rule = [*["---"] * num_names, *["--:"] * (len(lines[0]) - num_names)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


def model_table(rows: Sequence[Row], goals: Mapping[tuple[str, int, float], float] | None = None) -> str:
    """One line per model, length and task: the full cache's score, and the share of it that each policy keeps.

    Args:
        rows: with the scores of their questions; a policy is compared over the questions that it was asked.
        goals: least shares of the default policy without options, by task, length and budget; missed ones are marked.
    """
    asked = [row for row in rows if row.task not in FIDELITY_TASKS]
    systems = sorted({(-row.budget, _name(row)) for row in asked if row.policy != FULL})
    heads = ["model", "task", "tokens", "questions", "full", *(f"`{label}` {-budget:g}" for budget, label in systems)]
    lines = [heads]
    for (model, tokens, task), by_system in _by_task(asked).items():
        full = by_system[-1.0, FULL]
        least = {
            (-budget, DEFAULT_POLICY): goal for (*of, budget), goal in (goals or {}).items() if of == [task, tokens]
        }
        cells = [_verdict(_share(by_system, system), least.get(system, 0.0)) for system in systems]
        if any(cells):  # nothing is shown of what only other pages compare
            lines.append([model, f"`{task}`", f"{tokens:,}", str(len(full)), f"{fmean(full.values()):.2f}", *cells])
    return _table(lines, 2)


def policy_table(rows: Sequence[Row], budget: float) -> str:
    """One line per policy: the share of the full cache's score that it keeps of each task.

    Policies that keep most of the first task come first.

    Args:
        rows: of one model and length; as in :func:`model_table`.
        budget: of what is shown.
    """
    found = {f"`{task}`": by_system for (_, _, task), by_system in _by_task(rows).items()}
    labels = {label for by_system in found.values() for of, label in by_system if of == -budget}
    shares = {label: [_share(by_system, (-budget, label)) for by_system in found.values()] for label in labels}
    first = {label: of[0][0] if of[0] is not None else 0.0 for label, of in shares.items()}
    lines = [["policy", *found]]
    for label in sorted(labels, key=lambda label: (-first[label], label)):
        lines.append([f"`{label}`", *map(_cell, shares[label])])
    return _table(lines, 1)


def _verdict(share: tuple[float, float] | None, goal: float) -> str:
    """The cell; bold where a goal is missed, italic where it is missed within the error."""
    if share is None or share[0] >= goal:
        return _cell(share)
    mark = "*" if share[0] + share[1] >= goal else "**"
    return f"{mark}{_cell(share)}{mark}"


def fidelity_table(rows: Sequence[Row]) -> str:
    """One line per model, length and system on real text: agreement, divergence and the text's own likelihood."""
    lines = [["model", "task", "system", "tokens", "positions", "top-1", "KL", "NLL"]]
    ordered = sorted(rows, key=lambda row: (row.model, row.task, row.tokens, -row.budget, row.label))
    for row in ordered:
        if row.task in FIDELITY_TASKS and row.kl is not None and row.nll is not None:
            system = "full cache" if row.policy == FULL else f"`{row.label}` {row.budget:g}"
            system += PEERS * (row.engine == "kvpress")
            figures = [f"{row.tokens:,}", str(row.questions), f"{row.score:.3f}", f"{row.kl:.4f}", f"{row.nll:.3f}"]
            lines.append([row.model, f"`{row.task}`", system, *figures])
    return _table(lines, 3)
