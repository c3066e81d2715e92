"""Results, rows of a CSV file: written by the check, read by the report and by the next check."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from peers.cases import Press
from peers.replay import Comparison

ROOT = Path(__file__).resolve().parents[2]
LATEST = ROOT / "out" / "peers" / "kvpress.csv"
COMMITTED = ROOT / "docs" / "results" / "policies-peers.csv"


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        case: name of the case.
        expected: "same" or "differs".
        prompt: its name.
        num_tokens: of the prompt.
        kept_share: budget.
        num_entries: kept over all layers and heads, on each side.
        num_heads: layers times KV heads.
        num_equal: heads with equal sets.
        num_rounding: further heads that differ by an exchange of tokens with equal scores up to rounding.
        overlap: share of the kept entries that both keep.
        worst_overlap: the same of the worst head.
        press: the peer, as constructed.
        policy: ours.
        options: its options, JSON.
        tail: last tokens of the prompt behind our range.
        protected: first tokens that our side keeps in every head.
    """

    case: str
    expected: str
    prompt: str
    num_tokens: int
    kept_share: float
    num_entries: int
    num_heads: int
    num_equal: int
    num_rounding: int
    overlap: float
    worst_overlap: float
    press: str
    policy: str
    options: str
    tail: int
    protected: int

    @property
    def key(self) -> tuple[str, str, float]:
        """What identifies the row."""
        return self.case, self.prompt, self.kept_share

    @property
    def same(self) -> bool:
        """Equal sets in every head, up to rounding."""
        return self.num_equal + self.num_rounding == self.num_heads


def to_row(comparison: Comparison) -> Row:
    """The comparison as it is written."""
    case = comparison.case
    return Row(
        case=case.name,
        expected="same" if case.coincides else "differs",
        prompt=comparison.prompt,
        num_tokens=comparison.num_tokens,
        kept_share=comparison.kept_share,
        num_entries=comparison.num_entries,
        num_heads=comparison.num_heads,
        num_equal=comparison.num_equal,
        num_rounding=comparison.num_rounding,
        overlap=round(comparison.overlap, 4),
        worst_overlap=round(comparison.worst_overlap, 4),
        press=press_text(case.press),
        policy=case.policy,
        options=json.dumps(case.options),
        tail=case.tail,
        protected=case.protected,
    )


def press_text(press: Press) -> str:
    """The press as Python."""
    inner = [] if press.inner is None else [press_text(press.inner)]
    return f"{press.name}({', '.join(inner + [f'{name}={value}' for name, value in press.options.items()])})"
