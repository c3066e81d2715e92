"""Results as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvevict_quality.rows import Row
from kvevict_quality.tasks import NEEDLE_TASKS, TASKS

FULL = "full"
#: Needle tasks count where the full cache reaches this.
SOLVED = 0.6


def relative(rows: Iterable[Row], full: Sequence[Row]) -> float | None:
    """Mean over the needle tasks that the full cache solves, as a share of its mean; None if one is missing.

    Args:
        rows: of one system at one budget and one length.
        full: of the full cache of the same engine, or of stock for our server, at the same length.
    """
    solved = {row.task: row.score for row in full if row.task in NEEDLE_TASKS and row.score >= SOLVED}
    scores = {row.task: row.score for row in rows if row.task in solved}
    if not solved or scores.keys() != solved.keys():
        return None
    return sum(scores.values()) / sum(solved.values())


def full_rows(rows: Sequence[Row], engine: str) -> list[Row]:
    """Rows of the full cache that an engine's rows are measured against."""
    own = "kvpress" if engine == "kvpress" else "stock"
    return [row for row in rows if row.policy == FULL and row.engine == own]


def settings(rows: Sequence[Row]) -> dict[tuple[int, int], list[Row]]:
    """Rows of each (length, seed): the same contexts and questions, so what may be compared."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.tokens, row.seed)):
        groups.setdefault((row.tokens, row.seed), []).append(row)
    return groups


def systems(rows: Sequence[Row]) -> dict[tuple[str, str, float], list[Row]]:
    """Rows of each (engine, label, budget)."""
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.engine, row.label, row.budget), []).append(row)
    return groups


def full_table(rows: Sequence[Row]) -> str:
    """Score of the full cache on every task and length."""
    stock = [row for row in rows if row.engine == "stock" and row.policy == FULL and row.task in TASKS]
    lengths = sorted({row.tokens for row in stock})
    scores = {(row.task, row.tokens): row for row in stock}
    lines = [_line(["task", *(f"{tokens} tokens" for tokens in lengths)]), _line(["---"] * (len(lengths) + 1))]
    for task in TASKS:
        found = [scores.get((task, tokens)) for tokens in lengths]
        lines.append(_line([task, *(f"{row.score:.2f} ({row.questions})" if row else "" for row in found)]))
    return "\n".join(lines) + "\n"


def policy_table(rows: Sequence[Row]) -> str:
    """One line per system and budget, best first within a budget: all tasks, and fidelity."""
    names = [task for task in TASKS if any(row.task == task for row in rows)]
    lines = [_line(["budget", "engine", "policy", "kept", "needles, of full", *names, "top-1", "KL"])]
    lines.append(_line(["---"] * (len(names) + 7)))
    order = []
    for (engine, label, budget), group in systems(rows).items():
        share = relative(group, full_rows(rows, engine))
        order.append((-budget, -(share if share is not None else -1.0), engine, label, group, share))
    for budget, _, engine, label, group, share in sorted(order, key=lambda entry: entry[:4]):
        by_task = {row.task: row for row in group}
        kept = sum(row.kept_share for row in group) / len(group)
        cells = [f"{by_task[name].score:.2f}" if name in by_task else "" for name in names]
        fidelity = by_task.get("fidelity")
        cells += [f"{fidelity.score:.3f}", f"{fidelity.kl:.3f}"] if fidelity else ["", ""]
        of_full = "" if share is None else f"{100 * share:.0f} %"
        lines.append(_line([f"{-budget:g}", engine, label, f"{kept:.3f}", of_full, *cells]))
    return "\n".join(lines) + "\n"


def plain_table(rows: Sequence[Row]) -> str:
    """Kept share, quality, memory, speed: for each budget the policy of our server that keeps most."""
    lines = [
        _line(
            ["kept share", "policy", "needles, of full", "token slots per 1,000 tokens", "s to prepare", "s to answer"]
        )
    ]
    lines.append(_line(["---"] * 6))
    best: dict[float, tuple[float, str, list[Row]]] = {}
    for (engine, label, budget), group in systems(rows).items():
        share = relative(group, full_rows(rows, engine))
        if engine != "kvpress" and share is not None and (budget not in best or share > best[budget][0]):
            best[budget] = (share, label, [row for row in group if row.task in NEEDLE_TASKS])
    for _, (share, label, group) in sorted(best.items(), reverse=True):
        kept = sum(row.slots for row in group) / sum(row.context_tokens for row in group)
        prepare, answer = (
            sum(values) / len(group) for values in zip(*((r.prepare_s, r.answer_s) for r in group), strict=True)
        )
        lines.append(
            _line(
                [f"{kept:.3f}", label, f"{100 * share:.0f} %", f"{1000 * kept:.0f}", f"{prepare:.1f}", f"{answer:.1f}"]
            )
        )
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
