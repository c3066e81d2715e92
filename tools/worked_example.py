"""The worked example of docs/design.md: python tools/worked_example.py writes its table into the page.

Requests go through SGLang's real tree and pools (``tests/helpers/harness.py``), without a model: which entries of a
head are kept is the choice of made-up scores; how many of all heads together, and where they lie, is what a server
does.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("SGLANG_PLATFORM", "kvevict_cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

from sglang.srt.managers.schedule_batch import Req
from write_tables import with_block

from helpers.harness import NO_ROTARY, Harness, publish_server_args
from helpers.learned import random_scores
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies import build_policy

PAGE = ROOT / "docs" / "design.md"
POOL = 1400
"""Token slots."""
A = [number * 7 % 50 for number in range(1000)]
B = A[:600] + [number * 11 % 47 + 50 for number in range(300)]
C = A[:600] + list(range(100, 140))
TITLES = (
    "token slots held",
    "free",
    "evictable",
    "reclaimable",
    "entries read: 16 bits",
    "8 bits",
    "4 bits",
    "in slots",
)


class Story:
    """Runs the example once. ``rows``: of the table, by step."""

    def __init__(self) -> None:
        config, policy = KVEvictConfig(), build_policy("distilled", {})
        self.harness = Harness(
            POOL, max_tokens=POOL, config=config, policy=policy, bits="auto", host_blocks=POOL, scores_any_range=True
        )
        compressor = self.harness.tree.compressor
        compressor.learned = random_scores(self.harness.geometry, NO_ROTARY)
        self.rows: dict[str, list[int]] = {}
        a = self._run("A is computed", A)
        b = self._run("B branches off", B)
        c = self._run("C branches off", C)
        for req in (a, b, c):
            self.harness.finish(req)
        self._note("all are released")
        self.harness.evict(POOL)
        self._note("all is dropped")
        self.harness.finish(self._run("A is asked again", A))
        self.harness.finish(self._run("A is asked with `complete`", A, complete=True))
        self.harness.finish(self._run("A is asked with `exact`", A, exact=True))

    def _run(self, step: str, tokens: list[int], *, complete: bool = False, exact: bool = False) -> Req:
        req = self.harness.request(tokens, options={"complete": complete, "exact": exact})
        record = self.harness.tree.prefixes.readers[req]
        record.least_share, record.is_exact = float(complete), exact
        assert self.harness.admit(req) and self.harness.prefill(req)
        self._note(step, req)
        return req

    def _note(self, step: str, req: Req | None = None) -> None:
        tree, free = self.harness.tree, self.harness.allocator.available_size()
        row = [POOL - free, free, tree.evictable_size(), tree.prefixes.pressure.reclaimable()]
        if req is not None:
            (path,) = tree.read_paths([req])
            row += [sum(int(runs.lens.sum()) for runs in path if runs.bits == bits) for bits in (16, 8, 4)]
            row.append(len(req.origin_input_ids) - sum(runs.num_tokens for runs in path if runs.is_counted))
        self.rows[step] = row


def table() -> str:
    """One row a step, in Markdown."""
    lines = ["|".join(["", "step", *TITLES, ""]), "|---|" + "--:|" * len(TITLES)]
    for step, row in Story().rows.items():
        cells = [*(f"{number:,}" for number in row), *[""] * (len(TITLES) - len(row))]
        lines.append("|".join(["", step, *cells, ""]))
    return "\n".join(lines)


def main() -> None:
    """Write the table into the page."""
    with tempfile.TemporaryDirectory() as folder:
        publish_server_args(Path(folder))
        PAGE.write_text(with_block(PAGE.read_text(encoding="utf-8"), "worked example", table()), encoding="utf-8")


if __name__ == "__main__":
    main()
