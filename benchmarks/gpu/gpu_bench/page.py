"""JSON and Markdown of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_bench.bars import verdicts

TITLES = {
    "correctness": "Kernels against their float32 references",
    "error": "Decode over a long prefix: largest error against float32",
    "bandwidth": "Decode over unshared prefixes",
    "sharers": "Decode, many requests on one prefix",
    "planning": "Host work of a decode step",
    "graph": "A captured decode step that follows requests to other spans (attention only)",
    "compaction": "Compaction of one prefix",
    "compression": "Whole compression of one prefix: scores, selection, packing",
    "uniform": "Dense decode over as many entries",
    "extend": "New tokens of one request on a compressed prefix",
    "shapes": "Decode with other head_dims and numbers of KV heads",
    "servers": "Real servers end to end",
    "server-checks": "What servers were asked beside that",
    "ordering": "Moving and poisoning slots beside running forwards",
}
NOTES = {
    "bandwidth": "Copy: bytes read and written by a large device copy. A layer's bytes: K, V and index of all entries. "
    "Rows of 4 bits: up to four times the entries in as many bytes.",
    "extend": "Beside dense attention over as many keys. Prefix 0: our kernel all the same; a server takes FlashInfer.",
    "servers": "llama-8B's shape with random weights, each server alone. What is asked: `benchmarks/gpu/serve_gpu.py`.",
    "planning": "While planning and running, torch raises at anything that waits for the device.",
    "graph": "Before these replays the batch stays the same; a new batch costs what the section above says.",
    "compaction": "Rows whose source lies in a slot that is written go through a temporary: read and written twice.",
    "compression": "Stand-in: one llama-8B layer's matrix products and causal attention, times the layers; a real "
    "prefill takes longer. While a prefix is compressed once, torch raises at anything that waits for the device.",
    "ordering": "Without the fence, wrong forwards show that the check can fail.",
}


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``<name>.json`` and ``<name>.md``; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{results['date'][:10]}-{results['device'].lower().replace(' ', '-')}"
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    if paths[0].exists():  # parts of one day's run are put together
        before = json.loads(paths[0].read_text())
        kept = {section: rows for section, rows in before["failures"].items() if section not in results["sections"]}
        results = (
            before
            | results
            | {
                "setting": before["setting"] | results["setting"],
                "sections": before["sections"] | results["sections"],
                "failures": kept | results["failures"],
            }
        )
    paths[0].write_text(json.dumps(results, indent=1) + "\n")
    paths[1].write_text(markdown(results))
    return paths


def markdown(results: dict[str, Any]) -> str:
    """The page."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    sizes = ", ".join(f"{name} {value}" for name, value in results["setting"].items())
    lines = [f"# {results['device']}, {results['date']}", "", f"{versions}.", "", f"Sizes: {sizes}.", ""]
    if text := results.get("differences"):
        lines += ["Not an installation of SGLang, but the kit of `tools/gpu_kit`:", "", "```", text.rstrip(), "```", ""]
    if "GB/s of a copy" in results:
        lines += [f"A device copy reads and writes {results['GB/s of a copy']:.0f} GB/s.", ""]
    lines += ["## Bars", "", *_table(verdicts(results["sections"])), ""]
    for section, rows in results["sections"].items():
        lines += [f"## {TITLES[section]}", ""]
        if section in NOTES:
            lines += [NOTES[section], ""]
        lines += _table(rows) if rows else ["Not measured here."]
        lines.append("")
    for section, message in results["failures"].items():
        lines += [f"## Failed: {section}", "", "```", message, "```", ""]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(rows[0])
    body = [f"| {' | '.join(_show(row[name]) for name in names)} |" for row in rows]
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", *body]


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
