"""The worked example of docs/design/prefix.md: python tools/worked_example.py writes its numbers into the page.

Requests go through SGLang's real tree and pools (``tests/helpers/harness.py``), without a model: which entries of a
head are kept is the choice of made-up scores; how many of all heads together, and where they lie, is what a server
does. What is said of each step is in worked_example.md, with places for the numbers.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("SGLANG_PLATFORM", "kvevict_cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

from write_tables import with_block

from helpers.harness import NO_ROTARY, Harness, publish_server_args
from helpers.learned import random_scores
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies import build_policy

PAGE = ROOT / "docs" / "design" / "prefix.md"
POOL = 1400
"""Token slots."""
A = [number * 7 % 50 for number in range(1000)]
B = A[:600] + [number * 11 % 47 + 50 for number in range(300)]
C = [number * 13 % 43 + 150 for number in range(1150)]
"""Shares nothing with A, and needs a few slots more than are free beside A and B."""
PROMPTS = (A, B, C, [], A, A, A)
"""Of the steps; [] drops everything."""
TITLES = "step|slots held|free|evictable|reclaimable|entries read: 16 bits|4 bits|tokens in ordinary slots"


def example() -> str:
    """The steps as a list, then one row a step, in Markdown."""
    config, policy = KVEvictConfig(), build_policy("distilled", {})
    sizes = {"max_tokens": POOL, "host_blocks": POOL}
    harness = Harness(POOL, config=config, policy=policy, bits="auto", scores_any_range=True, **sizes)
    tree, prefixes = harness.tree, harness.tree.prefixes
    tree.compressor.learned = random_scores(harness.geometry, NO_ROTARY)
    told, rows, slots, entries = [], [f"|{TITLES}|", "|---|" + "--:|" * TITLES.count("|")], 0, 0
    steps = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").splitlines()
    for i, (tokens, sentence) in enumerate(zip(PROMPTS, steps, strict=True)):
        step, free = sentence.split(".**")[0].strip("*"), harness.allocator.available_size()
        facts, row = {"tokens": len(tokens), "found": len(tokens) - 1, "free": free, "slots": slots}, []
        if not tokens:
            for req in list(harness.live):
                harness.finish(req)
            harness.evict(POOL)
        else:
            req = harness.request(tokens, options={"complete": "complete" in step, "exact": "exact" in step})
            record = prefixes.readers[req]
            record.least_share, record.is_exact = float("complete" in step), "exact" in step
            assert harness.admit(req) and harness.prefill(req)
            (path,) = tree.read_paths([req])
            row = [sum(int(runs.lens.sum()) for runs in path if runs.bits == bits) for bits in (16, 4)]
            row.append(len(tokens) - sum(runs.num_tokens for runs in path))
        left, reclaimable = harness.allocator.available_size(), prefixes.pressure.reclaimable()
        cells = [f"{number:,}" for number in (POOL - left, left, tree.evictable_size(), reclaimable, *row)]
        rows.append("|".join(["", step, *cells, *[""] * (7 - len(cells)), ""]))
        facts |= {"reclaimable": reclaimable, "moved": prefixes.totals.moved_out_segments}
        if segments := list(prefixes.table.packed):
            a, b = segments[0], segments[-1]
            facts |= {"a": a, "b": b, "all": a.num_tokens * harness.geometry.num_runs, "grown": a.num_slots - slots}
            facts |= {"back": a.num_entries - entries, "shared": sum(row[:2]) - b.num_entries}
            slots, entries = a.num_slots, a.num_entries
        told.append(f"{i + 1}. {sentence.format(**facts)}")
        if "asked" in step:
            harness.finish(req)
    return "\n".join([*told, "", *rows])


def main() -> None:
    """Write the example into the page."""
    with tempfile.TemporaryDirectory() as folder:
        publish_server_args(Path(folder))
        PAGE.write_text(with_block(PAGE.read_text(encoding="utf-8"), "worked example", example()), encoding="utf-8")


if __name__ == "__main__":
    main()
