"""Take over the results of the last complete check: ``PYTHONPATH=tools .venv/bin/python -m peers.report``.

Copies ``out/peers/kvpress.csv`` to ``docs/results/policies-peers.csv`` and rewrites the tables in ``policies-peers.md``
beside it (between its two markers). Everything else in that page is written by hand.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from itertools import groupby

from peers.cases import KEPT_SHARES, Case, Press, make_cases
from peers.prompts import PROMPTS
from peers.replay import Recording
from peers.results import COMMITTED, LATEST, ROOT, Row

from kvevict_tools.csv_rows import read_records

PAGE = ROOT / "docs" / "results" / "policies-peers.md"
BEGIN, END = "<!-- results: written by tools/peers/report.py -->", "<!-- end of results -->"


def main() -> None:
    """Write both files."""
    shutil.copyfile(LATEST, COMMITTED)
    rows = read_records(COMMITTED, Row)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{render(rows)}\n{END}{after}")


def render(rows: list[Row]) -> str:
    """The generated part of the page."""
    cases = {case.name: case for share in KEPT_SHARES for case in make_cases(1000, share)}
    groups = {name: list(group) for name, group in groupby(rows, key=lambda row: row.case)}
    lines = [*provenance(rows), "", "### Equal sets: the definitions coincide", ""]
    lines += ["|method|kvpress|ours|tail|heads equal|what coincides|", "|---|---|---|---|---|---|"]
    for name, group in groups.items():
        if cases[name].coincides:
            lines.append(f"|{identity(cases[name], group)}|{equal_heads(group)}|{cases[name].reason}|")
    lines += ["", "### Other sets: the definitions differ", ""]
    shares = "|".join(f"in common at {share:.0%} (worst head)" for share in KEPT_SHARES)
    lines += [f"|method|kvpress|ours|tail|{shares}|why|", "|---|---|---|---|---|---|---|"]
    for name, group in groups.items():
        if not cases[name].coincides:
            common = "|".join(overlap([row for row in group if row.kept_share == share]) for share in KEPT_SHARES)
            lines.append(f"|{identity(cases[name], group)}|{common}|{cases[name].reason}|")
    return "\n".join(lines) + "\n"


def provenance(rows: list[Row]) -> Iterator[str]:
    """Versions, prompts, date."""
    metadata = Recording(PROMPTS[0].name).metadata
    theirs = ", ".join(f"{name} {metadata[name]}" for name in ("kvpress", "transformers", "torch"))
    lengths = {row.prompt: row.num_tokens for row in rows}
    heads = sum(row.num_heads for row in rows)
    yield f"`make test-peers`, {date.today().isoformat()}; CPU, float32, SmolLM2-135M-Instruct (30 layers, 3 KV heads)."
    yield f"kvpress side: {theirs}. Our side: sgl-kvevict {version('sgl-kvevict')}, torch {version('torch')}."
    yield f"{len(rows)} comparisons, {heads:,} heads. Prompts:"
    yield ""
    for prompt in PROMPTS:
        yield f"- `{prompt.name}`: {prompt.source}, {lengths[prompt.name]} tokens"


def identity(case: Case, group: list[Row]) -> str:
    """The columns that say what is compared."""
    options = common_options([json.loads(row.options) for row in group])
    ours = f"`{case.policy}`" + (f"<br>`{options}`" if options else "")
    sinks = f", {case.protected} sinks protected" if case.protected else ""
    tail = f"{case.tail}{sinks}" if len({row.tail for row in group}) == 1 else "window"
    return f"{case.method}|`{press_text([press_of(case, row) for row in group])}`|{ours}|{tail}"


def press_of(case: Case, row: Row) -> Press:
    """The press of one row (some of its arguments follow from the prompt's length)."""
    return next(c.press for c in make_cases(row.num_tokens, row.kept_share) if c.name == case.name)


def press_text(presses: list[Press]) -> str:
    """The press as Python, without the budget."""
    inner = [press.inner for press in presses if press.inner is not None]
    options = common_options([{k: v for k, v in p.options.items() if k != "compression_ratio"} for p in presses])
    parts = ([press_text(inner)] if inner else []) + ([options] if options else [])
    return f"{presses[0].name.removesuffix('Press')}({', '.join(parts)})"


def common_options(options: list[dict[str, object]]) -> str:
    """``name=value`` of every option; an ellipsis where the value depends on the prompt."""
    texts = {name: {json.dumps(one[name]) for one in options} for name in options[0]}
    joined = ", ".join(f"{name}={values.pop() if len(values) == 1 else '…'}" for name, values in texts.items())
    return re.sub(r'"([a-z_-]+)"', r"\1", joined)


def equal_heads(group: list[Row]) -> str:
    """How many heads agree."""
    equal, rounding = sum(row.num_equal for row in group), sum(row.num_rounding for row in group)
    text = f"{equal:,} of {sum(row.num_heads for row in group):,}"
    return text + (f", {rounding} more but for ties" if rounding else "")


def overlap(group: list[Row]) -> str:
    """Mean over the prompts, and the worst head."""
    mean = sum(row.overlap for row in group) / len(group)
    return f"{mean:.2%} ({min(row.worst_overlap for row in group):.0%})"


if __name__ == "__main__":
    main()
