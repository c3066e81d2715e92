"""Figures of documents are those of committed results and of the code, and results files that they name exist."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from kvevict_kernels import row_codec
from sgl_kvevict.cache import pressure, recency
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.distill import learner, row_sums, texts
from sgl_kvevict.policies.budgets import AllLayersBudget

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
SERVING, FOUND = RESULTS / "serving", "Prompt tokens found in the cache, %"
SMALL, QWEN, LARGE = "SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct", "Qwen2.5-Coder-1.5B-Instruct"
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]


def rows(path: Path) -> list[list[str]]:
    """Cells of all rows of all tables of a page."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]


def readme_row(label: str) -> list[str]:
    """Figures of a row of the README: stock, nothing compressed, ours."""
    (found,) = [cells for cells in rows(ROOT / "README.md") if cells[0].startswith(label)]
    return [cell.strip("*") for cell in found[1:]]


def bars(benchmark: str, metric: str) -> dict[tuple[str, str], str]:
    """Measured figures with one decimal, by point and system."""
    found = [cells for cells in rows(SERVING / "bars.md") if (cells[0], cells[4:5]) == (benchmark, [f"`{metric}`"])]
    return {(cells[1], cells[2]): f"{float(cells[6].split(' ')[0]):.1f}" for cells in found}


def table_under(page: Path, heading: str) -> list[dict[str, str]]:
    """Rows of the first table under a heading, by the names of its columns (the first may have none)."""
    section = page.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    table = section[section.index("\n|") + 1 :].split("\n\n")[0]
    names, _, *found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return [dict(zip(names, cells, strict=True)) for cells in found]


@pytest.fixture(scope="module")
def demo() -> dict:
    """The last line that `make compare` printed, as committed."""
    return json.loads((RESULTS / "demo.txt").read_text(encoding="utf-8").splitlines()[-1])


def test_slots_and_documents_are_those_of_the_demo(demo: dict) -> None:
    systems = ("stock", "nothing compressed", "sgl-kvevict")
    assert readme_row("documents of 822 tokens") == [str(demo["documents_that_fit"][name]) for name in systems]
    picture = README.split("```")[1]
    assert f" {demo['compressed_tokens']:,} " in picture and f" {demo['compressed_slots']:,} " in picture


@pytest.mark.parametrize(("times", "hit_rate"), [(4, "cache hit rate (prompt"), (32, "cache hit rate, shared")])
def test_requests_and_hits_are_those_of_shared_prefix(times: int, hit_rate: str) -> None:
    tables = [table_under(SERVING / "shared-prefix.md", name) for name in ("Requests/s", FOUND)]
    requests, hits = (row for table in tables for row in table if row[""] == f"{times}x the pool")
    ratios = [float(requests[system].split("**")[1].strip("x")) for system in ("none", "default")]
    assert readme_row(f"requests/s, shared prefixes {times} times") == ["1x", *(f"{ratio:.1f}x" for ratio in ratios)]
    assert readme_row(hit_rate) == [f"{hits[system]} %" for system in ("stock", "none", "default")]


def test_decode_is_that_of_the_bars() -> None:
    ratios = bars("decode", "decode_tokens_per_s")
    shown = [f"{ratios['prefix 3000, batch 1', system]}x" for system in ("budget 1", "default")]
    assert readme_row("decode tokens/s, one request on a prefix of 3,000") == ["1x", *shown]


def test_times_of_the_tree_are_those_of_the_bars() -> None:
    names = ("match, hit", "lock and unlock", "match that splits a node", "insert a branch", "evict one leaf")
    ratios = bars("insertion", "cpu_us")
    hit, lock, split, insert, evict = (ratios[name, "compressed"] for name in names)
    assert f"stock's in Rust: a match takes {hit} times as long, a split {split} times" in " ".join(README.split())
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert f"hit {hit}x, lock {lock}x, split {split}x, insert {insert}x (evict {evict}x)" in page


def test_quality_is_that_of_the_tables_and_the_first_screen_says_what_is_lost() -> None:
    with (RESULTS / "quality" / "results.csv").open(encoding="utf-8") as file:
        found = {
            (row["model"], row["task"], row["policy"], row["options"], row["budget"]): row
            for row in csv.DictReader(file)
            if (row["engine"], row["tokens"]) == ("kvevict", "1024")
        }

    def kept(model: str, task: str) -> int:
        full, ours = found[model, task, "full", "", "1.0"], found[model, task, "distilled", "", "0.2"]
        assert full["questions"] == ours["questions"]
        return round(100 * float(ours["score"]) / float(full["score"]))

    needles, table = kept(SMALL, "needle-multi-key"), kept(SMALL, "table")
    assert readme_row("score of questions about one number")[2] == f"{needles} %"
    assert readme_row("score of questions about a table")[2] == f"{table} %"
    assert {found[SMALL, task, "full", "", "1.0"]["questions"] for task in ("needle-multi-key", "table")} == {"48"}
    text = " ".join(README.split())
    assert f"SmolLM2-135M keeps {needles} % of the full cache's score on needles" in text
    assert f"and {table} % on tables (48 questions each" in text
    assert (
        f"A 1.5B model keeps {kept(LARGE, 'needle-multi-key')} % on needles and {kept(LARGE, 'table')} % on tables"
        in text
    )


def test_constants_in_the_table_of_choices_are_those_of_the_code() -> None:
    config = KVEvictConfig()
    current = {
        "RIDGE": learner.RIDGE,
        "SCORE_FLOOR": learner.SCORE_FLOOR,
        "SAMPLED_TOKENS": learner.SAMPLED_TOKENS,
        "MIN_RECALL": learner.MIN_RECALL,
        "NUM_TEXTS": texts.NUM_TEXTS,
        "ANSWERS": pressure.ANSWERS,
        "LOSS_OF_LOADING": recency.LOSS_OF_LOADING,
        "REACH": row_codec.REACH,
        "MIN_SHARE": row_sums.MIN_SHARE,
        "SPREAD_POSITIONS": row_sums.SPREAD_POSITIONS,
        "floor_share": AllLayersBudget().floor_share,
        **{name: getattr(config, name) for name in KVEvictConfig.model_fields},
    }
    shown = {}
    for row in table_under(ROOT / "docs" / "quality.md", "What each constant was chosen on"):
        names = re.findall(r"`(\w+)`", row["constant"])
        shown |= dict(zip(names, row["value"].split(", "), strict=True)) if names else {}
    assert len(shown) >= 14
    assert shown == {name: f"{current[name]:,}" for name in shown}


def test_the_price_of_compression_is_that_of_the_insertion_benchmark() -> None:
    (row,) = [
        row
        for row in table_under(RESULTS / "serving" / "insertion.md", "Compression, ms")
        if row[""] == "compress 3000 tokens"
    ]
    milliseconds = float(row["compressed"])
    prefills = table_under(RESULTS / "serving" / "prefill.md", "Prompt tokens/s")
    (speed,) = [float(row["stock"]) for row in prefills if row[""] == "2 prompts of 3000"]
    part = f"{milliseconds * speed / 3000 / 10:.0f} %"
    took = f"[{milliseconds:.0f} ms](docs/results/serving/insertion.md) on two CPU cores, {part}"
    shown = f"To compress a prompt of 3,000 tokens takes {took}"
    assert shown in " ".join(README.split())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_results_that_a_document_names_exist(document: Path) -> None:
    named = re.findall(r"docs/results/[\w./-]*\w", document.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_table_of_the_dial_has_the_shares_of_its_points() -> None:
    with (RESULTS / "quality" / "dial.csv").open(encoding="utf-8") as file:
        kept = {
            (
                row["model"],
                row["bits"],
                row["budget"],
            ): f"{100 * float(row['share']):.0f} ± {100 * float(row['error']):.0f} %"
            for row in csv.DictReader(file)
        }
    shown = table_under(ROOT / "docs" / "quality.md", "The dial")
    points = [(share, bits) for share in ("0.2", "0.1", "0.05") for bits in ("auto", "16")]
    for row, (share, bits) in zip(shown, points, strict=True):
        assert (row["bits"], f"`budget` {share})" in row["bytes"]) == (bits.replace("auto", "default"), True)
        assert list(row.values())[2:] == [kept.get((model, bits, share), "") for model in (SMALL, QWEN, LARGE)]


def test_goals_that_the_default_misses_are_those_of_the_table() -> None:
    """The table marks what is missed beyond one standard error in bold."""
    text = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    names, _, *lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.split("<!-- bits: ")[1].split("<!-- end of bits")[0].splitlines()
        if line.startswith("|")
    ]
    found = [dict(zip(names, cells, strict=True)) for cells in lines]
    missed = [(row["model"], row["task"], name, cell) for row in found for name, cell in row.items() if "**" in cell]
    assert missed == [
        (SMALL, "`reading`", "`distilled` 0.2", "**88 ± 7 %**"),
        (SMALL, "`squad`", "`distilled` 0.1", "**70 ± 13 %**"),
        (SMALL, "`table`", "`distilled` 0.2", "**86 ± 7 %**"),
    ]
    words = " ".join(text.split())
    assert "86 ± 7 % of its `table` and 88 ± 7 % of `reading` at a fifth, 70 ± 13 % of `squad` at a tenth" in words
    others = {"`code`", "`few-shot`", "`key-value`", "`long-chat`", "`multi-turn`", "`pattern`"}
    kept = [share(row["`distilled` 0.2"]) for row in found if row["model"] == SMALL and row["task"] in others]
    assert f"the default keeps {min(kept)} to {max(kept)} % at a fifth" in words and len(kept) == len(others)
    below = [
        (row["model"], row["task"])
        for row in found
        if row["`distilled` 0.05"]
        and row["`distilled bits=16` 0.2"]
        and share(row["`distilled` 0.05"]) < share(row["`distilled bits=16` 0.2"])
    ]
    tasks = {name: [task for model, task in below if model == name] for name in (SMALL, QWEN, LARGE)}
    both = ["`squad`", "`table`"]
    assert tasks == {SMALL: ["`factbook`", "`reading`", *both], QWEN: ["`needles`", *both], LARGE: both}


def share(cell: str) -> int:
    """Of a cell with an error."""
    return int(cell.strip("*").split(" ")[0])
