"""Write the tables of docs/results/papers/tables.md from results.csv beside it.

Run: python benchmarks/papers/write_page.py [--check]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paper_bench.results import Results, mean_and_error

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "papers" / "results.csv"
DOCUMENT = RESULTS.with_name("tables.md")
LOSS_BUDGETS = ("0.2", "0.4")
LATENCY_TOKENS = (2048, 4096)
KEPT = ("0.75", "0.5", "0.25", "0.1")


def eviction_loss(results: Results) -> str:
    """Ada-KV, Fig. 3."""
    lines = table(
        "budget", "split of the heads", "loss / uniform", "texts lower", "layers clearly lower", "clearly higher"
    )
    for budget in LOSS_BUDGETS:
        for case in ("formula", "code", "algorithm 1"):
            ratios = results.per_text("ada-kv", f"loss ratio, {budget}", case)
            by_layer = f"loss ratio by layer, {budget}, {case}"
            layers = [results.per_text("ada-kv", by_layer, layer) for layer in results.cases("ada-kv", by_layer)]
            bounds = [mean_and_error(values.values()) for values in layers]
            lower = sum(mean + 2 * error < 1 for mean, error in bounds)
            higher = sum(mean - 2 * error > 1 for mean, error in bounds)
            texts = f"{sum(value < 1 for value in ratios.values())} of {len(ratios)}"
            lines.append(row(budget, case, shown(ratios, 3), texts, f"{lower} of {len(layers)}", str(higher)))
    return "\n".join(lines)


def concentration(results: Results) -> str:
    """Ada-KV, Fig. 1."""
    lines = table("of the tokens before the window", "share")
    for case in ("in 5%", "in 20%"):
        values = results.per_text("ada-kv", "heads with 95 % of their mass", case)
        lines.append(row(f"heads that have 95 % of their attention {case} of them", shown(values, 3)))
    for case in ("median head", "widest head"):
        values = results.per_text("ada-kv", "tokens for 95 % of the mass", case)
        lines.append(row(f"tokens that hold 95 % of the attention of the {case}", shown(values, 3)))
    return "\n".join(lines)


def latency(results: Results) -> str:
    """Ada-KV, Fig. 7."""
    lines = table("tokens", "kept", "of the token slots", "attention of a step, ms", "to snapkv")
    for tokens in LATENCY_TOKENS:
        what = f"attention of a step, ms, {tokens} tokens"
        base = results.per_text("ada-kv", what, "snapkv")
        for case in results.cases("ada-kv", what):
            slots = results.per_text("ada-kv", f"share of the slots, {tokens} tokens", case)
            times = results.per_text("ada-kv", what, case)
            ratios = {text: times[text] / base[text] for text in times}
            lines.append(row(f"{tokens:,}", case, shown(slots, 3), shown(times, 2), shown(ratios, 2)))
    return "\n".join(lines)


def similarity(results: Results) -> str:
    """ChunkKV, Table 3."""
    lines = table("10 % kept", "Jaccard similarity of adjacent layers")
    what = "similarity of adjacent layers"
    found = {case: results.per_text("chunkkv", what, case) for case in results.cases("chunkkv", what)}
    for case, values in sorted(found.items(), key=lambda item: mean_and_error(item[1].values())[0]):
        lines.append(row(case, shown(values, 3)))
    return "\n".join(lines)


def losses(paper: str, base: str) -> Callable[[Results], str]:
    """Negative log-likelihood of a paper's cases, and how it differs from one of them on the same texts."""

    def make(results: Results) -> str:
        kinds = ("answer", "running text")
        heads = [head for kind in kinds for head in (f"{kind}, nats", f"minus {base}")]
        lines = table("case", *heads)
        cases = results.cases(paper, f"nll, {kinds[0]}")
        first = results.per_text
        cases.sort(key=lambda case: mean_and_error(first(paper, f"nll, {kinds[0]}", case).values())[0])
        for case in cases:
            cells = []
            for kind in kinds:
                own, other = (results.per_text(paper, f"nll, {kind}", name) for name in (case, base))
                difference = {text: own[text] - other[text] for text in own.keys() & other.keys()}
                cells += [f"{mean_and_error(own.values())[0]:.3f}", "" if case == base else shown(difference, 3, "+")]
            lines.append(row(case, *cells))
        return "\n".join(lines)

    return make


def coverage(results: Results) -> str:
    """K-VEC, Tables 6 and 7."""
    lines = table("kept", *KEPT)
    for case in (
        "random",
        "snapkv",
        "ada-snapkv",
        "neither",
        "cross-head",
        "cross-layer",
        "both",
        "neither, pool of 7",
        "both, pool of 7",
    ):
        lines.append(row(case, *(shown(results.per_text("k-vec", f"coverage, {kept} kept", case), 3) for kept in KEPT)))
    return "\n".join(lines)


TABLES: Mapping[str, Callable[[Results], str]] = {
    "eviction loss": eviction_loss,
    "concentration": concentration,
    "latency": latency,
    "similarity": similarity,
    "chunkkv losses": losses("chunkkv", "chunks of 10"),
    "d2o losses": losses("d2o", "d2o"),
    "coverage": coverage,
    "k-vec losses": losses("k-vec", "neither"),
}


def table(*heads: str) -> list[str]:
    """Head and rule of a table."""
    return [row(*heads), row(*["---"] * len(heads))]


def row(*cells: str) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def shown(values: Mapping[int, float], digits: int, sign: str = "") -> str:
    """Mean and standard error over the texts; nothing if there is none."""
    if not values:
        return ""
    mean, error = mean_and_error(values.values())
    return f"{mean:{sign}.{digits}f} ± {error:.{digits}f}"


def with_tables(text: str, results: Results) -> str:
    """The document with its generated parts replaced."""
    for name, make in TABLES.items():
        found = re.search(rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end of {name} -->)", text, re.DOTALL)
        if found is None:
            raise ValueError(f"{DOCUMENT.name} lacks the marks of {name!r}")
        text = text[: found.end(1)] + make(results) + "\n" + text[found.start(2) :]
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite the document, or check that it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail when the document is not up to date")
    args = parser.parse_args(arguments)
    text = DOCUMENT.read_text(encoding="utf-8")
    new = with_tables(text, Results(RESULTS))
    if args.check and new != text:
        raise SystemExit(f"{DOCUMENT.name} is out of date: run python benchmarks/papers/write_page.py")
    DOCUMENT.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
