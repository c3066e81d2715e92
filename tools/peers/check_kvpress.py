"""Our policies keep what kvpress keeps, wherever the definitions coincide. Run by ``make test-peers`` only.

Not named test_*: it needs recordings that kvpress' own environment makes (record_kvpress.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from peers.cases import KEPT_SHARES, make_cases
from peers.prompts import PROMPTS
from peers.records import record_path
from peers.replay import Recording, compare, only_rounding
from peers.results import COMMITTED, LATEST, Row, to_row

from kvevict_tools.csv_rows import read_records, write_records

NAMES = list(dict.fromkeys(case.name for share in KEPT_SHARES for case in make_cases(1000, share)))
OVERLAP_TOLERANCE = 0.005
"""Between machines, of the share of entries in common."""


@cache
def recording(prompt_name: str) -> Recording:
    if not record_path(prompt_name).is_file():
        pytest.exit("no recordings of kvpress: run `make test-peers`", returncode=2)
    return Recording(prompt_name)


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """Collects every comparison of this run; a complete run is written to a file."""
    collected: list[Row] = []
    yield collected
    if {row.case for row in collected} == set(NAMES):
        write_records(LATEST, Row, sorted(collected, key=lambda row: NAMES.index(row.case)))
        print(f"\nwritten: {LATEST.relative_to(LATEST.parents[2])}")


@pytest.mark.parametrize("name", NAMES)
def test_kept_positions(name: str, rows: list[Row]) -> None:
    here = []
    for prompt in PROMPTS:
        record = recording(prompt.name)
        for share in KEPT_SHARES:
            cases = {case.name: case for case in make_cases(record.num_tokens, share)}
            if name in cases:
                here.append(to_row(compare(record, prompt.name, share, cases[name])))
    rows += here
    report = "\n".join(
        f"{row.prompt}, {row.kept_share:.0%} kept: {row.num_equal} of {row.num_heads} heads equal, {row.num_rounding} "
        f"up to rounding, {row.overlap:.2%} of the entries in common"
        for row in here
    )
    if here[0].expected == "same":
        assert all(row.same for row in here), report
    else:
        assert not all(row.same for row in here), f"said to differ, and does not:\n{report}"


def test_committed_results_are_those_of_this_run(rows: list[Row]) -> None:
    committed = {row.key: row for row in read_records(COMMITTED, Row)}
    for row in rows:
        before = committed.pop(row.key, None)
        assert before is not None, f"{row.key} is not in {COMMITTED.name}: run `python -m peers.report`"
        assert (row.expected, row.num_entries, row.same) == (before.expected, before.num_entries, before.same), row.key
        assert row.overlap == pytest.approx(before.overlap, abs=OVERLAP_TOLERANCE), row.key
    assert not {key for key in committed if key[0] in {row.case for row in rows}}


def masks(*heads: list[int]) -> torch.Tensor:
    return torch.tensor([heads], dtype=torch.bool)


def test_an_exchange_of_equal_scores_is_rounding_and_nothing_else_is() -> None:
    scores = torch.tensor([[[3.0, 2.0, 2.000001, 1.0], [3.0, 2.0, 1.9, 1.0]]])
    theirs = masks([1, 1, 0, 0], [1, 1, 0, 0])
    assert only_rounding(scores, masks([1, 0, 1, 0], [1, 0, 1, 0]), theirs).tolist() == [[True, False]]
    assert only_rounding(scores, masks([1, 1, 0, 0], [1, 0, 0, 0]), theirs).tolist() == [[True, False]]
    assert only_rounding(scores, masks([1, 1, 1, 0], [1, 0, 0, 0]), theirs).tolist() == [[True, True]]
    assert only_rounding(scores, masks([1, 1, 0, 1], [1, 0, 0, 0]), theirs).tolist() == [[False, False]]
