"""Results as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvevict_quality.rows import Row
from kvevict_quality.tasks import NEEDLE_TASKS, TASKS
from sgl_kvevict.config import KVEvictConfig

FULL = "full"
DEFAULT_POLICY = KVEvictConfig().policy
#: Policies, and the presses of kvpress that do the same.
COUNTERPARTS = {
    "snapkv": "SnapKVPress",
    "ada-snapkv": "AdaKVPress(SnapKVPress)",
    "pyramidkv": "PyramidKVPress",
    "chunkkv": "ChunkKVPress(SnapKVPress)",
    "expected-attention": "ExpectedAttentionPress",
    "keydiff": "KeyDiffPress",
    "knorm": "KnormPress",
    "streaming-llm": "StreamingLLMPress",
    "random": "RandomPress",
    "reconstruction": "KVzipPress",
}
#: Needle tasks count where the full cache reaches this.
SOLVED = 0.6


def relative(rows: Iterable[Row], full: Sequence[Row]) -> float | None:
    """Mean over the needle tasks that the full cache solves, as a share of its mean; None if one is missing.

    Every seed that was measured counts, each against the full cache's answers to the same questions.

    Args:
        rows: of one system at one budget and one length.
        full: of the full cache of the same engine, or of stock for our server, at the same length.
    """
    scores = {(row.seed, row.task): row.score for row in rows if row.task in NEEDLE_TASKS}
    seeds = {seed for seed, _ in scores}
    solved = {
        (row.seed, row.task): row.score
        for row in full
        if row.seed in seeds and row.task in NEEDLE_TASKS and row.score >= SOLVED
    }
    if not solved or not solved.keys() <= scores.keys():
        return None
    return sum(scores[key] for key in solved) / sum(solved.values())


def full_rows(rows: Sequence[Row], engine: str) -> list[Row]:
    """Rows of the full cache that an engine's rows are measured against."""
    own = "kvpress" if engine == "kvpress" else "stock"
    return [row for row in rows if row.policy == FULL and row.engine == own]


def by_length(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Rows of each length, shortest first."""
    return {tokens: [row for row in rows if row.tokens == tokens] for tokens in sorted({row.tokens for row in rows})}


def systems(rows: Sequence[Row]) -> dict[tuple[str, str, float], list[Row]]:
    """Rows of each (engine, label, budget)."""
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.engine, row.label, row.budget), []).append(row)
    return groups


def full_table(rows: Sequence[Row]) -> str:
    """Score of the full cache on every task and length, and the number of questions."""
    stock = [row for row in rows if row.engine == "stock" and row.policy == FULL and row.task in TASKS]
    lengths = by_length(stock)
    lines = [_line(["task", *(f"{tokens} tokens" for tokens in lengths)]), _line(["---"] * (len(lengths) + 1))]
    for task in TASKS:
        found = [[row for row in group if row.task == task] for group in lengths.values()]
        cells = [f"{_mean(group):.2f} ({sum(row.questions for row in group)})" if group else "" for group in found]
        lines.append(_line([task, *cells]))
    return "\n".join(lines) + "\n"


def policy_table(rows: Sequence[Row]) -> str:
    """One line per system and budget, best first within a budget: all tasks, and fidelity.

    Scores are means over the seeds that were measured; what several seeds give alone stands in brackets.

    Args:
        rows: of one length.
    """
    names = [task for task in TASKS if any(row.task == task for row in rows)]
    lines = [_line(["budget", "engine", "policy", "kept", "needles, of full", *names, "top-1", "KL"])]
    lines.append(_line(["---"] * (len(names) + 7)))
    order = []
    for (engine, label, budget), group in systems(rows).items():
        share = relative(group, full_rows(rows, engine))
        order.append((-budget, -(share if share is not None else -1.0), engine, label, group, share))
    for budget, _, engine, label, group, share in sorted(order, key=lambda entry: entry[:4]):
        kept = sum(row.kept_share for row in group) / len(group)
        by_task = [[row for row in group if row.task == name] for name in names]
        cells = [f"{_mean(found):.2f}" if found else "" for found in by_task]
        fidelity = next((row for row in group if row.task == "fidelity"), None)
        cells += [f"{fidelity.score:.3f}", f"{fidelity.kl:.3f}"] if fidelity else ["", ""]
        of_full = "" if share is None else f"{100 * share:.0f} %{_by_seed(group, full_rows(rows, engine))}"
        lines.append(_line([f"{-budget:g}", engine, label, f"{kept:.3f}", of_full, *cells]))
    return "\n".join(lines) + "\n"


def aware_table(agnostic: Sequence[Row], aware: Sequence[Row]) -> str:
    """Share of the full cache's score on needles, with the question in the compressed prompt and without.

    Each with its standard error and number of questions. Best with the question first, each policy's counterpart in
    kvpress below it.

    Args:
        agnostic: rows of one length, contexts compressed alone.
        aware: rows of the same length, prompts compressed with their question.
    """
    sides = [(systems(rows), rows) for rows in (aware, agnostic)]
    budgets = sorted({row.budget for row in aware if row.policy != FULL}, reverse=True)
    names = dict.fromkeys((engine, label) for groups, _ in sides for engine, label, _ in groups if label != FULL)
    found = {}
    for engine, label in names:
        shares = [
            _share(groups.get((engine, label, budget), []), full_rows(rows, engine))
            for groups, rows in sides
            for budget in budgets
        ]
        if any(shares):
            found[engine, label] = shares
    heads = [f"{budget:g}, {name}" for name in ("in the prompt", "unknown") for budget in budgets]
    lines = [_line(["engine", "policy", *heads]), _line(["---"] * (len(heads) + 2))]
    for engine, label in _with_counterparts(sorted(found, key=lambda name: _worth(found[name]))):
        cells = ["" if share is None else "{:.0%} ± {:.0%} ({})".format(*share) for share in found[engine, label]]
        lines.append(_line([engine, label, *cells]))
    return "\n".join(lines) + "\n"


def _worth(shares: Sequence[tuple[float, float, int] | None]) -> tuple[float, ...]:
    """To sort by: mean score with the question, then without; what was not measured comes last."""
    half = len(shares) // 2
    sides = ([share[0] for share in side if share is not None] for side in (shares[:half], shares[half:]))
    return tuple(-sum(side) / len(side) if side else 1.0 for side in sides)


def _with_counterparts(names: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same names, a press of kvpress behind the policy that is its counterpart here."""
    behind = {("kvpress", press): ("kvevict", policy) for policy, press in COUNTERPARTS.items()}
    places = {name: place for place, name in enumerate(names)}
    return sorted(names, key=lambda name: (places.get(behind.get(name, name), places[name]), name in behind))


def _share(rows: Sequence[Row], full: Sequence[Row]) -> tuple[float, float, int] | None:
    """:func:`relative` with its standard error, questions taken as independent, and the number of questions."""
    share = relative(rows, full)
    if share is None:
        return None
    tasks = {(row.seed, row.task): row for row in full if row.task in NEEDLE_TASKS and row.score >= SOLVED}
    counted = [row for row in rows if (row.seed, row.task) in tasks]
    variance = sum(row.score * (1 - row.score) / row.questions for row in counted)
    scale = sum(tasks[row.seed, row.task].score for row in counted)
    return share, math.sqrt(variance) / scale, sum(row.questions for row in counted)


def _mean(rows: Sequence[Row]) -> float:
    return sum(row.score for row in rows) / len(rows)


def _by_seed(rows: Sequence[Row], full: Sequence[Row]) -> str:
    seeds = sorted({row.seed for row in rows})
    shares = [relative([row for row in rows if row.seed == seed], full) for seed in seeds]
    found = [f"{100 * share:.0f}" for share in shares if share is not None]
    return f" ({', '.join(found)})" if len(found) > 1 else ""


def plain_table(rows: Sequence[Row]) -> str:
    """Kept share, quality, memory, speed: the full cache, and the server's default policy at each budget."""
    lines = [
        _line(
            ["kept share", "policy", "needles, of full", "token slots per 1,000 tokens", "s to prepare", "s to answer"]
        )
    ]
    lines.append(_line(["---"] * 6))
    shown: dict[float, tuple[float, str, list[Row]]] = {}
    for (engine, label, budget), group in systems(rows).items():
        share = relative(group, full_rows(rows, engine))
        if engine != "kvpress" and share is not None and label in (FULL, DEFAULT_POLICY):
            shown[budget] = (share, label, [row for row in group if row.task in NEEDLE_TASKS])
    for _, (share, label, group) in sorted(shown.items(), reverse=True):
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
