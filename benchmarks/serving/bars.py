"""The bars that the serving benchmarks are held to, beside what the committed rows show; writes bars.md."""

from __future__ import annotations

from dataclasses import dataclass

from serving_bench.compare import Ratio, median, ratio
from serving_bench.results import RESULTS, read_rows


@dataclass(frozen=True)
class Bar:
    """One demand on ours relative to the baseline.

    Attributes:
        benchmark: name of the CSV file.
        point: a point of it.
        system: whose figures.
        metric: which.
        limit: the bar.
        is_cost: the ratio must be at most ``limit``, not at least.
        is_absolute: the median itself, not the ratio to the baseline.
        baseline: whom the ratio refers to.
    """

    benchmark: str
    point: str
    system: str
    metric: str
    limit: float
    is_cost: bool = False
    is_absolute: bool = False
    baseline: str = "stock"

    @property
    def demand(self) -> str:
        """``<= 0.30x``."""
        return ("<= " if self.is_cost else ">= ") + (f"{self.limit:g}" if self.is_absolute else f"{self.limit:.2f}x")

    def is_met(self, value: float) -> bool:
        """Whether a ratio, or a median, is on the right side."""
        return value <= self.limit if self.is_cost else value >= self.limit


DEFAULT = "default"
FOUR = "4x the pool"
NO_STORE = "no store"
RESTARTED = "a document of 2,800 tokens, after a restart"
WRITING = "2x the pool, new documents all the time"
AGENTS, DRAFTS = "4x the pool, every question", "4x the pool, drafts"
TREE = ("match, hit", "match, miss", "lock and unlock", "match that splits a node", "insert a branch", "evict one leaf")
STOCK_TREE = "stock UnifiedRadixCache"
PYTHON_TREE = "stock, Python core"
BARS = (
    Bar("shared-prefix", FOUR, DEFAULT, "ttft_ms", 0.3, is_cost=True),
    *(
        bar
        for times, speed, found in ((4, 6.0, 96.5), (8, 4.0, 96.5), (16, 6.0, 96.5), (32, 5.0, 95), (64, 4.0, 88))
        for bar in (
            Bar("shared-prefix", f"{times}x the pool", DEFAULT, "requests_per_s", speed),
            Bar("shared-prefix", f"{times}x the pool", DEFAULT, "hit_rate_pct", found, is_absolute=True),
        )
    ),
    *(
        bar
        for point, speed in (("8x the pool", 3.5), ("16x the pool", 5.0))
        for bar in (
            Bar("pressure", point, DEFAULT, "requests_per_s", speed),
            Bar("pressure", f"{point}, all rounds", DEFAULT, "needle_score", 0.88),
        )
    ),
    Bar("multi-turn", FOUR, DEFAULT, "requests_per_s", 5.0),
    Bar("pressure", FOUR, DEFAULT, "requests_per_s", 4.0),
    Bar("pressure", FOUR, DEFAULT, "hit_rate_pct", 90, is_absolute=True),
    Bar("pressure", FOUR, DEFAULT, "needle_score", 0.9),
    Bar("pressure", f"{FOUR}, all rounds", DEFAULT, "needle_score", 0.9),
    Bar("agents", FOUR, DEFAULT, "requests_per_s", 17.0),
    Bar("agents", AGENTS, DEFAULT, "needle_score", 0.95, baseline="none"),
    *(Bar("agents", DRAFTS, name, "hit_rate_pct", 0.98, baseline="without drafts") for name in ("NGRAM", "EAGLE")),
    Bar("judges", "generated-shared-prefix, 4x the pool", DEFAULT, "requests_per_s", 4.0),
    Bar("judges", "random, nothing shared", DEFAULT, "requests_per_s", 0.97),
    Bar("judges", "cache-pressure", DEFAULT, "retained", 25, is_absolute=True),
    Bar("hot", "prefix 3000, 4 clients, long answers", DEFAULT, "decode_tokens_per_s", 1.3, baseline="budget 1"),
    Bar("shared-prefix", "0.5x the pool", DEFAULT, "requests_per_s", 1.0, baseline="none"),
    Bar("shared-prefix", "0.5x the pool", "none", "requests_per_s", 0.97),
    Bar("shared-prefix", "0.5x the pool", "budget 1", "requests_per_s", 0.97),
    Bar("store", RESTARTED, "store", "ttft_ms", 0.25, is_cost=True, baseline=NO_STORE),
    Bar("store", RESTARTED, "store", "same_answers_pct", 100, is_absolute=True),
    Bar("store", RESTARTED, "store", "bytes_pct", 22, is_cost=True, is_absolute=True),
    Bar("store", "a document of 2,800 tokens, after it left the pool", "host memory", "load_pct", 3, True, True),
    Bar("store", WRITING, "store, written only", "requests_per_s", 0.97, baseline=NO_STORE),
    Bar("store", "8x the pool", "store", "requests_per_s", 1.5, baseline=NO_STORE),
    Bar("decode", "prefix 4096, batch 8", DEFAULT, "decode_tokens_per_s", 8.0),
    Bar("decode", "prefix 3000, batch 1", DEFAULT, "decode_tokens_per_s", 2.0),
    Bar("decode", "prefix 3000, batch 1", DEFAULT, "ttft_s", 0.3, is_cost=True),
    Bar("decode", "prefix 3000, batch 1", "budget 1", "decode_tokens_per_s", 1.0),
    Bar("prefill", "3 prompts of 1024", DEFAULT, "prompt_tokens_per_s", 0.95),
    Bar("prefill", "2 prompts of 3000", DEFAULT, "prompt_tokens_per_s", 0.95),
    Bar("prefill", "1 prompts of 8000", DEFAULT, "prompt_tokens_per_s", 0.95),
    *(Bar("insertion", point, "compressed", "cpu_us", 2.0, is_cost=True, baseline=STOCK_TREE) for point in TREE),
    *(Bar("insertion", point, "compressed", "calls", 2.0, is_cost=True, baseline=PYTHON_TREE) for point in TREE),
)


def measured(bar: Bar) -> tuple[float, str] | None:
    """The figure to compare, and how it is shown; None if it was not measured."""
    rows = read_rows(RESULTS / f"{bar.benchmark}.csv")
    if bar.is_absolute:
        value = median(rows, bar.point, bar.system, bar.metric)
        return None if value is None else (value, f"{value:.1f}")
    found: Ratio | None = ratio(rows, bar.point, bar.system, bar.metric, bar.baseline)
    return None if found is None else (found.median, str(found))


def table() -> str:
    """All bars as Markdown."""
    lines = ["| benchmark | point | system | to | metric | bar | measured | |", "|---|---|---|---|---|--:|--:|---|"]
    for bar in BARS:
        found = measured(bar)
        shown, verdict = "not measured yet", ""
        if found is not None:
            shown, verdict = found[1], "met" if bar.is_met(found[0]) else "**missed**"
        whom = "" if bar.is_absolute else bar.baseline
        cells = (bar.benchmark, bar.point, bar.system, whom, f"`{bar.metric}`", bar.demand, shown, verdict)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Write and print the table."""
    what = "Ours to stock, or to the system named; median (lowest-highest) of the repetitions."
    text = f"# Bars\n\n{what}\n\n{table()}\n"
    (RESULTS / "bars.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
