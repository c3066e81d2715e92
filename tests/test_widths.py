"""How many entries fit how many token slots in rows of 16 and of 4 bits: arithmetic on the host."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevict_kernels.row_codec import WIDTHS, rows_per_slot
from sgl_kvevict.config import Bits
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.widths import rows_that_fit

SETTINGS: tuple[Bits, ...] = ("auto", 16)


def geometry(num_runs: int = 6) -> KVGeometry:
    return KVGeometry(num_runs, 1, 1, 32, 4096)


def in_place(num_slots: int, num_tokens: int, bits: Bits = "auto", *, num_sinks: int = 0) -> dict[int, int]:
    """What a range with all its entries in rows of 16 bits gets; entries per run."""
    of = geometry()
    count = num_tokens * of.num_runs
    parts = rows_that_fit(of, num_slots, count, bits, num_sinks=num_sinks * of.num_runs)
    return {width: number // of.num_runs for width, number in parts}


@pytest.mark.parametrize(
    ("num_slots", "kept"),
    [(1000, {16: 1000}), (999, {4: 1000}), (250, {4: 1000}), (200, {4: 800}), (100, {4: 400}), (50, {4: 200})],
)
def test_bits_go_before_entries_do(num_slots: int, kept: dict[int, int]) -> None:
    """Of 1,000 tokens; at a quarter of the bytes every entry is there."""
    assert in_place(num_slots, 1000) == kept


def test_a_head_slot_holds_as_many_rows_as_the_kernels_say() -> None:
    of = geometry()
    assert [of.rows_per_slot(bits) for bits in WIDTHS] == [rows_per_slot(bits) for bits in WIDTHS]


def test_rows_of_16_bits_alone() -> None:
    assert in_place(200, 1000, 16) == {16: 200} and in_place(1000, 1000, 16) == {16: 1000}


def test_sinks_keep_sixteen() -> None:
    assert in_place(204, 1000, num_sinks=4) == {16: 4, 4: 800}
    assert in_place(500, 1000, num_sinks=4) == {16: 4, 4: 996}
    assert in_place(4, 1000, num_sinks=4) == {16: 4}


def test_no_entry_gets_wider_rows_than_it_has() -> None:
    of = geometry(1)
    assert rows_that_fit(of, 100, 1000, "auto", num_sinks=4, num_whole=0) == ((4, 400),)
    assert rows_that_fit(of, 100, 1000, "auto", num_sinks=4, num_whole=2) == ((16, 2), (4, 392))
    assert rows_that_fit(of, 900, 1000, "auto", num_whole=0) == ((4, 1000),)


@settings(deadline=None)
@given(
    num_runs=st.integers(1, 9),
    num_slots=st.integers(1, 60),
    num_entries=st.integers(0, 1200),
    data=st.data(),
    bits=st.sampled_from(SETTINGS),
)
def test_what_fits_is_never_more_and_hardly_less_than_the_slots_hold(
    num_runs: int, num_slots: int, num_entries: int, data: st.DataObject, bits: Bits
) -> None:
    of = geometry(num_runs)
    num_whole = data.draw(st.sampled_from([0, num_entries // 2, num_entries]))
    num_sinks = min(data.draw(st.integers(0, 4)) * num_runs, num_entries)

    def fitting(slots: int) -> dict[int, int]:
        of_entries = {"num_sinks": num_sinks, "num_whole": num_whole}
        return dict(rows_that_fit(of, slots, num_entries, bits, **of_entries))

    parts, cells = fitting(num_slots), num_slots * num_runs
    assert list(parts) == sorted(parts, reverse=True) and (min(parts.values()) > 0 or num_entries == 0)
    used, kept = of.head_slots_for(parts.items()), sum(parts.values())
    assert used <= cells and kept <= num_entries
    if bits == "auto":
        whole = parts.get(16, 0)
        assert whole <= num_whole
        if num_entries - whole <= (cells - whole) * of.rows_per_slot(4):
            assert kept == num_entries
    if kept < num_entries:
        assert used == cells
    more = fitting(num_slots + 1)
    assert sum(more.values()) >= kept
