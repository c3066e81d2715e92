"""Write generated tables: fields of the configuration, sockets, metrics, quality, and flows.

Run: python tools/write_tables.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "quality"))

from kvevict_quality.by_model import DEFAULT_POLICY, GOALS, fidelity_table, model_table, policy_table
from kvevict_quality.rows import AWARE_RESULTS, RESULTS, Row, read_rows
from kvevict_quality.systems import FULL
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from sgl_kvevict.cache.pressure import WITH_FEW_BITS
from sgl_kvevict.cli.output import mean_bits
from sgl_kvevict.cli.size import fits, parse_bytes, show_bytes
from sgl_kvevict.config import EventsConfig, KVEvictConfig
from sgl_kvevict.events.totals import ENTRIES, REFUSED, Gauges, Totals, descriptions
from sgl_kvevict.fields import allowed
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.sglang_adapter.hooks import FEATURES

ROOT = Path(__file__).resolve().parents[1]
LABELLED = {
    "pool_slots": "by `holder`: `compressed`, `full` (uncompressed nodes), `private` (running requests), `free`",
    "entries": "by `bits` of their rows: entries of compressed tokens",
    "refusals_total": "by `reason`; "
    + "; ".join(
        f"`{name.removeprefix(REFUSED).replace('_', '-')}`: {text.rstrip('.')}"
        for name, text in descriptions(Totals).items()
        if name.startswith(REFUSED)
    ),
    "errors_total": "exceptions caught, by `place` ([reliability.md](reliability.md))",
}
FLOWS = ROOT / "docs" / "results" / "flows.json"
SMALL = "SmolLM2-135M-Instruct"
LLAMA_8B = KVGeometry(num_layers=32, num_qo_heads=8, num_kv_heads=8, head_dim=128, num_token_slots=1)


def field_table(model: type[BaseModel]) -> str:
    """One row per field: name, default as JSON, what is allowed, meaning. Names of documents become links."""
    lines = ["|field|default|allowed|meaning|", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        value: Any = field.default_factory() if field.default is PydanticUndefined else field.default  # type: ignore[misc, call-arg]
        cells = (f"`{name}`", f"`{json.dumps(value)}`", allowed(field), field.description or "")
        lines.append("|" + "|".join(cell.replace("|", "\\|") for cell in cells) + "|")
    return re.sub(r"docs/([a-z/-]+\.md)(#[a-z-]+)?", r"[\1](\1\2)", "\n".join(lines))


def metrics_table() -> str:
    """One row per series of ``/metrics``: gauges, then counters (``_total``)."""
    rows = {name: text for name, text in descriptions(Gauges).items() if not name.startswith(("pool", ENTRIES))}
    for name, text in descriptions(Totals).items():
        if not name.startswith(REFUSED):
            rows[f"{name}_total"] = text
    lines = [f"|`kvevict:{name}`|{text.rstrip('.')}|" for name, text in (rows | LABELLED).items()]
    return "\n".join(["|series|meaning|", "|---|---|", *lines])


def size_table() -> str:
    """What ``sgl-kvevict size`` plans for prefixes of an 8B model, but for what depends on the pool alone."""
    lines = ["|share of the bytes|slots|memory|entries kept|bits|fit 40 GB|", "|---|--:|--:|--:|--:|--:|"]
    for row in fits(KVEvictConfig(), LLAMA_8B, 8000, parse_bytes("40GB") // LLAMA_8B.slot_bytes, 20_000):
        share = f"{row.share:g}" + (f" ({row.name})" if row.name else "").replace("(budget)", "(`budget`)")
        sizes = (
            f"{row.prefix_slots:,}",
            show_bytes(row.prefix_bytes),
            f"{row.kept:.0%}",
            f"{mean_bits(row.entries):.1f}",
        )
        lines.append("|".join(["", share.replace("(min_budget)", "(`min_budget`)"), *sizes, f"{row.prefixes:,}", ""]))
    return "\n".join(lines)


def dial_table() -> str:
    """One row per size of a prefix of 3,000 tokens of an 8B model, with the loss of the step that leads to it."""
    lines = ["|share of the bytes|token slots|entries kept|bits, mean|loss of the step to it|", "|--:|--:|--:|--:|--:|"]
    before = 1.0
    for row, part in zip(fits(KVEvictConfig(), LLAMA_8B, 3000, 300_000, 0), (None, *WITH_FEW_BITS), strict=True):
        cells = [f"{row.share:g}", f"{row.prefix_slots:,}", f"{100 * row.kept:.0f} %", f"{mean_bits(row.entries):.1f}"]
        lines.append("|".join(["", *cells, "" if part is None else f"{part / before:.2g}", ""]))
        before = row.share
    return "\n".join(lines)


def quality_tables(rows: Sequence[Row], aware: Sequence[Row]) -> dict[str, str]:
    """By the names of their places in the document.

    The dial; policies on the demo's model, and with the question in the prompt; beside presses of kvpress; real text.

    Presses are compared on the tasks, lengths and models that they have rows of, at the budgets that these rows have.

    Args:
        rows: of contexts that were compressed before their questions came.
        aware: of prompts that were compressed with their question.
    """
    ours = [row for row in rows if row.engine == "kvevict"]
    default = [row for row in ours if row.policy in (DEFAULT_POLICY, FULL) and row.options in ("", "bits=16")]
    pressed = [row for row in rows if row.engine == "kvpress"]
    asked = {(row.task, row.tokens, row.model, row.seed) for row in pressed}
    budgets = {row.budget for row in pressed} | {1.0}
    beside = [row for row in default if (row.task, row.tokens, row.model, row.seed) in asked and row.budget in budgets]
    small = [row for row in ours if (row.model, row.tokens) == (SMALL, 1024) and "bits" not in row.options]
    compared = {row.task for row in small if row.policy not in (DEFAULT_POLICY, FULL, "random")}
    return {
        "bits": model_table(default, GOALS).rstrip(),
        "policies": policy_table([row for row in small if row.task in compared], 0.2).rstrip(),
        "question in the prompt": model_table(aware).rstrip(),
        "equal bytes": model_table([*beside, *pressed]).rstrip(),
        "divergence": fidelity_table(rows).rstrip(),
    }


def flow_table() -> str:
    """One row per flow that ``tools/trace_flows.py`` counted."""
    lines = ["|flow|files|functions|crossings|calls|functions that resize|", "|---|--:|--:|--:|--:|--:|"]
    for name, counts in json.loads(FLOWS.read_text(encoding="utf-8"))["flows"].items():
        figures = [*(counts[key] for key in ("files", "functions", "crossings", "calls")), len(counts["resized by"])]
        lines.append("|".join(["", name, *(f"{figure:,}" if figure else "-" for figure in figures), ""]))
    return "\n".join(lines)


def hook_table() -> str:
    """One row per feature: functions of SGLang that it wraps."""
    lines = ["|feature|functions of SGLang that are wrapped|", "|---|---|"]
    for feature in FEATURES:
        targets = [".".join(hook.target.rsplit(".", 2)[-2:]) for hook in feature.hooks]
        lines.append(f"|{feature.name}|{' '.join(f'`{target}`' for target in targets)}|")
    return "\n".join(lines)


def with_block(text: str, name: str, body: str) -> str:
    """Replace what stands between ``<!-- NAME: ... -->`` and ``<!-- end of NAME -->``.

    Raises:
        SystemExit: there is no such place.
    """
    pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end of {name} -->)"
    replaced, count = re.subn(pattern, lambda match: f"{match[1]}{body}\n{match[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"expected one pair of comments of {name!r}, found {count}")
    return replaced


def main() -> None:
    """Write the tables, or say which document is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table is out of date")
    arguments = parser.parse_args()
    quality = quality_tables(read_rows(RESULTS), read_rows(AWARE_RESULTS))
    for document, name, table in (
        ("docs/configuration.md", "configuration", field_table(KVEvictConfig)),
        ("docs/serve.md", "sockets", field_table(EventsConfig)),
        ("docs/serve.md", "metrics", metrics_table()),
        ("docs/serve.md", "size", size_table()),
        ("docs/design/prefix.md", "dial", dial_table()),
        ("docs/design/layers.md", "flows", flow_table()),
        ("docs/design/sglang.md", "hooks", hook_table()),
        *(("docs/quality.md", name, table) for name, table in quality.items()),
    ):
        path = ROOT / document
        text = path.read_text(encoding="utf-8")
        current = with_block(text, name, table)
        if arguments.check and current != text:
            raise SystemExit(f"{document} is out of date: run python tools/write_tables.py")
        path.write_text(current, encoding="utf-8")


if __name__ == "__main__":
    main()
