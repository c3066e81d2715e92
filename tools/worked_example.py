"""The worked example of docs/design/prefix.md: python tools/worked_example.py writes its numbers into the page.

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
from sgl_kvevict.segments import Segment

PAGE = ROOT / "docs" / "design" / "prefix.md"
POOL = 1400
"""Token slots."""
A = [number * 7 % 50 for number in range(1000)]
B = A[:600] + [number * 11 % 47 + 50 for number in range(300)]
C = [number * 13 % 43 + 150 for number in range(1150)]
"""Shares nothing with A, and needs a few slots more than are free beside A and B."""
TITLES = (
    "slots held",
    "free",
    "evictable",
    "reclaimable",
    "entries read: 16 bits",
    "8 bits",
    "4 bits",
    "tokens in ordinary slots",
)


class Story:
    """Runs the example once.

    Attributes:
        rows: of the table, by step.
        sentences: what has happened in each step.
    """

    def __init__(self) -> None:
        config, policy = KVEvictConfig(), build_policy("distilled", {})
        self.harness = Harness(
            POOL, max_tokens=POOL, config=config, policy=policy, bits="auto", host_blocks=POOL, scores_any_range=True
        )
        self.harness.tree.compressor.learned = random_scores(self.harness.geometry, NO_ROTARY)
        self.rows: dict[str, list[int]] = {}
        self.sentences: list[str] = []
        self._tell_of_a_new_prompt_and_a_branch(config.budget, config.shares[-1])
        self._tell_of_short_slots()
        self._tell_of_a_return()

    def _tell_of_a_new_prompt_and_a_branch(self, budget: float, least: float) -> None:
        num_entries = len(A) * self.harness.geometry.num_runs
        self._a = self._run("A is computed", A)
        (a,) = self._segments()
        self._say(
            f"When its prefill is complete, {a.num_entries:,} of {num_entries:,} entries "
            f"({100 * a.num_entries / num_entries:.0f} %) are packed into {budget} * {len(A):,} = {a.num_slots} slots. "
            f"The other {num_entries - a.num_entries:,} move to the host's memory with 4 bits. The segment could "
            f"shrink further to {least} of its bytes, so {self.rows['A is computed'][3]} slots are reclaimable."
        )
        self._b = self._run("B branches off", B)
        _, b = self._segments()
        num_read = sum(self.rows["B branches off"][4:7])
        self._say(
            f"SGLang finds {b.start} tokens and splits the node there; no entry moves. B reads "
            f"{num_read - b.num_entries:,} entries of A's segment. Its other {b.num_tokens} tokens become a segment of "
            f"{b.num_slots} slots with {b.num_entries} entries."
        )

    def _tell_of_short_slots(self) -> None:
        a, _ = self._segments()
        before, free = a.num_slots, self.harness.allocator.available_size()
        c = self._run("C needs slots", C)
        self._say(
            f"C shares nothing with A. It needs {len(C):,} slots, and {free:,} are free. A and B are being answered, "
            f"so no leaf can be dropped. A's segment is resized from {before} to {a.num_slots} slots, and keeps "
            f"{a.num_entries:,} entries. A and B read the new rows from their next step on. C is packed as A was."
        )
        for req in (self._a, self._b, c):
            self.harness.finish(req)
        self.harness.evict(POOL)
        self._note("All is dropped")
        totals = self.harness.tree.prefixes.totals
        self._say(
            f"All requests have ended. {totals.moved_out_segments} segments are copied to the host's memory: of "
            f"{len(A):,}, {len(B)} and {len(C):,} tokens."
        )

    def _tell_of_a_return(self) -> None:
        self.harness.finish(self._run("A is asked again", A))
        (a,) = self._segments()
        self._say(
            f"The copy gets {a.num_slots} slots before SGLang matches the prompt. SGLang finds {len(A) - 1} tokens and "
            "computes 1, as always."
        )
        before, num_before = a.num_slots, a.num_entries
        self.harness.finish(self._run("A is asked with `complete`", A, complete=True))
        self._say(
            f"The {a.num_entries - num_before:,} entries that both steps had evicted come back with 4 bits, in "
            f"{a.num_slots - before} new slots."
        )
        self.harness.finish(self._run("A is asked with `exact`", A, exact=True))
        self._say(
            f"A's first token is compressed, so the request finds nothing. It computes {len(A):,} tokens in slots of "
            "its own, and releases them at its end."
        )

    def _segments(self) -> list[Segment]:
        """Those in the pool, the oldest first."""
        return list(self.harness.tree.prefixes.table.packed)

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

    def _say(self, sentence: str) -> None:
        """Of the last step."""
        self.sentences.append(f"{len(self.rows)}. **{list(self.rows)[-1]}.** {sentence}")


def example() -> str:
    """The steps as a list, then one row a step, in Markdown."""
    story = Story()
    lines = ["|".join(["", "step", *TITLES, ""]), "|---|" + "--:|" * len(TITLES)]
    for step, row in story.rows.items():
        cells = [*(f"{number:,}" for number in row), *[""] * (len(TITLES) - len(row))]
        lines.append("|".join(["", step, *cells, ""]))
    return "\n".join([*story.sentences, "", *lines])


def main() -> None:
    """Write the example into the page."""
    with tempfile.TemporaryDirectory() as folder:
        publish_server_args(Path(folder))
        PAGE.write_text(with_block(PAGE.read_text(encoding="utf-8"), "worked example", example()), encoding="utf-8")


if __name__ == "__main__":
    main()
