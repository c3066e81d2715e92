from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.tolerance import assert_same_bits
from kvevict_kernels.recode_rows import encoded_rows, prepare_on_cpu, recode_rows, temporary_bytes, write_encoded
from kvevict_kernels.recode_rows.numba_impl import calls
from kvevict_kernels.row_codec import (
    RowStatistics,
    decode_normalised,
    encode_normalised,
    encode_rows,
    read_rows,
    rows_per_slot,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")

LAYERS, SLOTS, HEADS = 2, 40, 3
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Store:
    """Arenas on the test's device with rows of all widths in places that do not overlap, and the model's statistics."""

    def __init__(self, device: str, dtype: torch.dtype, head_dim: int) -> None:
        self.device, self.dtype, self.head_dim = device, dtype, head_dim
        shape = (LAYERS, HEADS, head_dim)
        self.statistics = RowStatistics(
            *(x.to(device) for _ in "kv" for x in (5 * torch.randn(shape), torch.randn(shape).exp()))
        )
        self.k, self.v = (
            torch.full((LAYERS, SLOTS, HEADS, head_dim), torch.nan, dtype=dtype, device=device) for _ in "kv"
        )
        self.cells = torch.randperm(LAYERS * SLOTS * HEADS).tolist()

    @property
    def arenas(self) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """Both arenas with mean and deviation by run."""
        s = self.statistics
        return [
            (self.k, (s.k_mean.flatten(0, 1), s.k_scale.flatten(0, 1))),
            (self.v, (s.v_mean.flatten(0, 1), s.v_scale.flatten(0, 1))),
        ]

    def places(self, count: int, bits: int) -> Tensor:
        """Row numbers of this width in head slots that nobody has."""
        per_slot = rows_per_slot(bits, self.dtype.itemsize)
        cells = [self.cells.pop() for _ in range(-(-count // per_slot))]
        rows = torch.tensor([cell * per_slot + part for cell in cells for part in range(per_slot)], dtype=torch.int32)
        return rows[torch.randperm(len(rows))[:count]].to(self.device)

    def written(self, count: int, bits: int, runs: Tensor) -> Tensor:
        """Row numbers of new entries of these runs."""
        rows = self.places(count, bits)
        for arena, (mean, deviation) in self.arenas:
            x = (mean[runs.long()] + deviation[runs.long()] * torch.randn(count, self.head_dim, device=self.device)).to(
                self.dtype
            )
            encoded = (
                x.view(torch.uint8) if bits == 16 else encode_rows(x, mean[runs.long()], deviation[runs.long()], bits)
            )
            write_rows(arena, rows, bits, encoded)
        return rows

    def expected(self, rows: Tensor, widths: Tensor, runs: Tensor, bits: int) -> list[Tensor]:
        """Bytes of K and of V of entries in this width, entry by entry."""
        both = []
        for arena, (mean, deviation) in self.arenas:
            found = []
            for row, width, run in zip(rows.split(1), widths.tolist(), runs.tolist(), strict=True):
                encoded = read_rows(arena, row, width)
                if width == 16 != bits:
                    encoded = encode_rows(encoded.view(self.dtype), mean[run], deviation[run], bits)
                elif width != bits:
                    encoded = encode_normalised(decode_normalised(encoded, width), bits)
                found.append(encoded)
            both.append(torch.cat(found))
        return both


def runs_of(count: int, device: str) -> Tensor:
    return torch.randint(LAYERS * HEADS, (count,), dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_every_width_to_every_smaller_one(device: str, dtype: torch.dtype, head_dim: int) -> None:
    """Two targets in one call; bits as the definition has them, and nothing else is written."""
    store = Store(device, dtype, head_dim)
    counts = {16: 21, 8: 17, 4: 11}
    runs = [runs_of(count, device) for count in counts.values()]
    rows = [store.written(count, bits, own) for (bits, count), own in zip(counts.items(), runs, strict=True)]
    widths = torch.cat([torch.full((count,), bits) for bits, count in counts.items()]).to(device, torch.int8)
    all_rows, all_runs = torch.cat(rows), torch.cat(runs)
    # 8 bits: from 16 and 8; 4 bits: from all three, in any order
    entries = torch.arange(49, device=device)
    eights = entries[:38][torch.randperm(38, device=device)[:19]]
    fours = entries[~torch.isin(entries, eights)]
    fours = fours[torch.randperm(len(fours), device=device)]
    order = torch.cat([eights, fours])
    targets = [(store.places(19, 8), 8), (store.places(30, 4), 4)]
    want = [store.expected(all_rows[e], widths[e], all_runs[e], bits) for e, bits in ((eights, 8), (fours, 4))]
    before = [arena.clone() for arena, _ in store.arenas]
    recode_rows(store.k, store.v, all_rows[order], widths[order], all_runs[order], targets, store.statistics)
    for is_v, (arena, _) in enumerate(store.arenas):
        for (places, bits), expected in zip(targets, want, strict=True):
            assert_same_bits(f"rows of {bits} bits", read_rows(arena, places, bits), expected[is_v])
            write_rows(before[is_v], places, bits, expected[is_v])
        assert_same_bits("the rest", arena, before[is_v])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_rows_of_the_same_width_are_moved_bit_for_bit(device: str, bits: int, dtype: torch.dtype) -> None:
    """Into places that overlap their sources in a cycle; NaN too."""
    store = Store(device, dtype, 64)
    runs = runs_of(20, device)
    rows = store.places(20, bits)
    for arena, _ in store.arenas:
        content = torch.randint(256, read_rows(arena, rows, bits).shape, dtype=torch.uint8, device=device)
        write_rows(arena, rows, bits, content)
    want = [read_rows(arena, rows, bits) for arena, _ in store.arenas]
    widths = torch.full((20,), bits, dtype=torch.int8, device=device)
    recode_rows(store.k, store.v, rows, widths, runs, [(rows.roll(7), bits)], store.statistics)
    for (arena, _), expected in zip(store.arenas, want, strict=True):
        assert_same_bits("bytes", read_rows(arena, rows.roll(7), bits), expected)


def test_rows_are_packed_into_the_head_slots_they_come_from(device: str) -> None:
    """Sources and targets share cells: three rows of 4 bits lie where one of 16 was, whose entry went elsewhere."""
    store = Store(device, torch.bfloat16, 64)
    runs = runs_of(30, device)
    rows = store.written(30, 16, runs)
    cells = rows[torch.randperm(30, device=device)[:10]]
    targets = (cells[:, None] * 3 + torch.arange(3, device=device)).int().flatten()
    targets = targets[torch.randperm(30, device=device)]
    widths = torch.full((30,), 16, dtype=torch.int8, device=device)
    want = store.expected(rows, widths, runs, 4)
    recode_rows(store.k, store.v, rows, widths, runs, [(targets, 4)], store.statistics)
    for (arena, _), expected in zip(store.arenas, want, strict=True):
        assert_same_bits("bytes", read_rows(arena, targets, 4), expected)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_leave_the_arenas_encoded_and_come_back(device: str, dtype: torch.dtype, bits: int) -> None:
    """The bytes are those that a move would write; nothing else of the arenas changes."""
    store = Store(device, dtype, 64)
    widths = torch.tensor([width for width in (16, 8, 4) if width >= bits], dtype=torch.int8, device=device)
    widths = widths.repeat(40)[:40]
    runs = runs_of(40, device)
    rows = torch.cat([store.written(1, width, run) for width, run in zip(widths.tolist(), runs.split(1), strict=True)])
    want, before = store.expected(rows, widths, runs, bits), [arena.clone() for arena, _ in store.arenas]
    out = encoded_rows(store.k, store.v, rows, widths, runs, bits, store.statistics)
    places = store.places(40, bits)
    write_encoded(store.k, store.v, places, bits, *out)
    for (arena, _), copied, expected, old in zip(store.arenas, out, want, before, strict=True):
        assert_same_bits("copies", copied, expected)
        write_rows(old, places, bits, expected)
        assert_same_bits("arena", arena, old)
    nothing = encoded_rows(store.k, store.v, rows[:0], widths[:0], runs[:0], bits, store.statistics)
    write_encoded(store.k, store.v, rows[:0], bits, *nothing)


def test_bad_encoded_rows_are_named() -> None:
    store = Store("cpu", torch.bfloat16, 32)
    runs = runs_of(2, "cpu")
    given = (store.k, store.v, ROWS, WIDE, runs)
    with pytest.raises(ValueError, match="source_bits: expected 16 or 8, got 4"):
        encoded_rows(store.k, store.v, ROWS, WIDE // 4, runs, 8, store.statistics)
    with pytest.raises(ValueError, match="source_rows: expected indices in"):
        encoded_rows(store.k, store.v, ROWS + 10_000, WIDE, runs, 4, store.statistics)
    k, v = encoded_rows(*given, 4, store.statistics)
    for places, bits, rows, message in (
        (ROWS, 16, k, "bits: expected 8 or 4, got 16"),
        (ROWS * 0, 4, k, "places: expected rows that are all different"),
        (ROWS - 1, 4, k, "places: expected indices in"),
        (ROWS, 8, k, "k: expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            write_encoded(store.k, store.v, places, bits, rows, v)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_without_numba_torch_encodes(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """The same bytes, some rows at a time."""
    monkeypatch.setattr("kvevict_kernels.recode_rows.reason_not_to_run", lambda head_dim: "not installed")
    monkeypatch.setattr("kvevict_kernels.recode_rows.CHUNK_ROWS", 7)
    store = Store("cpu", torch.bfloat16, 32)
    runs = runs_of(60, "cpu")
    widths = torch.tensor([width for width in (16, 8, 4) if width >= bits], dtype=torch.int8).repeat(60)[:60]
    rows = torch.cat([store.written(1, width, run) for width, run in zip(widths.tolist(), runs.split(1), strict=True)])
    targets = store.places(60, bits)
    want = store.expected(rows, widths, runs, bits)
    recode_rows(store.k, store.v, rows, widths, runs, [(targets, bits)], store.statistics)
    for (arena, _), expected in zip(store.arenas, want, strict=True):
        assert_same_bits("bytes", read_rows(arena, targets, bits), expected)


def test_what_a_cpu_runs_is_compiled_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.cache_clear()
    prepare_on_cpu(64)
    monkeypatch.setattr("kvevict_kernels.recode_rows.numba_impl.compiled", lambda *_: 1 / 0)
    store = Store("cpu", torch.bfloat16, 64)
    runs = runs_of(3, "cpu")
    rows, widths = store.written(3, 16, runs), torch.full((3,), 16, dtype=torch.int8)
    recode_rows(store.k, store.v, rows, widths, runs, [(store.places(3, 4), 4)], store.statistics)


def test_the_temporary_is_given_and_holds_one_arena(device: str) -> None:
    """Parts of it begin aligned; a smaller one is refused before anything is written."""
    store = Store(device, torch.bfloat16, 32)
    runs = runs_of(12, device)
    rows, widths = store.written(12, 16, runs), torch.full((12,), 16, dtype=torch.int8, device=device)
    targets = [(store.places(7, 8), 8), (store.places(5, 4), 4)]
    assert temporary_bytes(store.k, targets) == 7 * 32 + 112
    temporary = torch.zeros(7 * 32 + 112, dtype=torch.uint8, device=device)
    before = store.k.clone()
    with pytest.raises(ValueError, match="temporary: expected 336 bytes, got 335"):
        recode_rows(store.k, store.v, rows, widths, runs, targets, store.statistics, temporary[:-1])
    assert_same_bits("keys", store.k, before)
    want = [store.expected(rows, widths, runs, 8)[1][:7], store.expected(rows, widths, runs, 4)[1][7:]]
    recode_rows(store.k, store.v, rows, widths, runs, targets, store.statistics, temporary)
    assert_same_bits("values of 8 bits", temporary[:224].view(7, 32), want[0])
    assert_same_bits("values of 4 bits", temporary[224:324].view(5, 20), want[1])


def test_what_is_too_large_saturates_on_every_device(device: str) -> None:
    store = Store(device, torch.float32, 32)
    runs = runs_of(4, device)
    rows = store.places(4, 16)
    for arena, _ in store.arenas:
        flat = arena.view(-1, 32)
        flat[rows.long()] = torch.finfo(torch.float32).max * torch.linspace(-1, 1, 32, device=device).sign()
        flat[rows[1].long()] = 0.0
        flat[rows[2].long()] = 1e-30
    widths = torch.full((4,), 16, dtype=torch.int8, device=device)
    for bits in (8, 4):
        targets = store.places(4, bits)
        want = store.expected(rows, widths, runs, bits)
        recode_rows(store.k, store.v, rows, widths, runs, [(targets, bits)], store.statistics)
        for (arena, _), expected in zip(store.arenas, want, strict=True):
            assert_same_bits("bytes", read_rows(arena, targets, bits), expected)


def test_nothing_to_do(device: str) -> None:
    store = Store(device, torch.bfloat16, 32)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    recode_rows(store.k, store.v, none, none.char(), none, [(none, 8), (none, 4)], store.statistics)
    recode_rows(store.k, store.v, none, none.char(), none, [], store.statistics)


ROWS = torch.tensor([0, 1], dtype=torch.int32)
WIDE = torch.tensor([16, 16], dtype=torch.int8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"source_rows": ROWS.long()}, "source_rows: expected dtype int32, got int64"),
        ({"source_bits": WIDE.int()}, "source_bits: expected dtype int8, got int32"),
        ({"source_bits": WIDE // 2 - 4}, "source_bits: expected 16 or 8, got 4"),
        ({"source_bits": WIDE - 3}, "source_bits: expected 16 or 8, got 13"),
        ({"runs": ROWS + 5}, r"runs: expected indices in \[0, 6\), got 5 to 6"),
        ({"source_rows": ROWS + LAYERS * SLOTS * HEADS - 1}, r"source_rows: expected indices in \[0, 240\)"),
        ({"targets": [(ROWS, 3)]}, "targets: expected rows of 16, 8 or 4 bits, got 3"),
        ({"targets": [(ROWS + 479, 8)]}, r"targets: expected indices in \[0, 480\), got 479 to 480"),
        ({"targets": [(ROWS * 0, 8)]}, "targets: expected rows that are all different"),
        ({"targets": [(ROWS[:1], 8)]}, r"targets: expected 2 rows, as many as source_rows, got \[1\]"),
        ({"statistics": None}, "statistics: rows of 8 bits need some, got None"),
        ({"temporary": torch.zeros(2)}, "temporary: expected dtype uint8, got float32"),
        ({"v_arena": torch.zeros(1)}, "v_arena: expected shape"),
    ],
)
def test_bad_arguments_are_named(changed: dict[str, object], message: str) -> None:
    store = Store("cpu", torch.bfloat16, 32)
    arguments = {
        "k_arena": store.k,
        "v_arena": store.v,
        "source_rows": ROWS,
        "source_bits": WIDE,
        "runs": ROWS,
        "targets": [(ROWS + 8, 8)],
        "statistics": store.statistics,
    }
    with pytest.raises(ValueError, match=message):
        recode_rows(**(arguments | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(("head_dim", "dtype"), [(48, torch.bfloat16), (32, torch.float8_e4m3fn)], ids=str)
def test_pools_that_hold_no_such_rows_are_refused(head_dim: int, dtype: torch.dtype) -> None:
    arena = torch.zeros(LAYERS, SLOTS, HEADS, head_dim).to(dtype)
    ones = torch.ones(LAYERS, HEADS, head_dim)
    message = "head_dim that is a multiple of 32, got bfloat16 and 48" if head_dim == 48 else "k_arena: expected dtype"
    with pytest.raises(ValueError, match=message):
        recode_rows(arena, arena.clone(), ROWS, WIDE, ROWS, [(ROWS + 8, 8)], RowStatistics(ones, ones, ones, ones))
