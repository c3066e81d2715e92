from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.encoded import assert_as_near
from helpers.tolerance import assert_same_bits
from kvevict_kernels.recode_rows import encoded_rows, prepare_on_cpu, recode_rows, temporary_bytes, write_encoded
from kvevict_kernels.recode_rows.numba_impl import calls
from kvevict_kernels.row_codec import (
    RowCoding,
    RowStatistics,
    decode_rows,
    encode_rows,
    read_rows,
    rows_per_slot,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")

LAYERS, SLOTS, HEADS = 2, 40, 3
DTYPES = [torch.bfloat16, torch.float16]


class Entries:
    """What entries are to have in a place of some bits: of one arena, entry by entry."""

    def __init__(self, numbers: Tensor, encoded: Tensor, is_kept: Tensor, mean: Tensor, scale: Tensor) -> None:
        self.numbers, self.encoded, self.is_kept = numbers, encoded, is_kept
        self.mean, self.scale = mean, scale

    def check(self, got: Tensor) -> None:
        """Bytes that are kept are the same; those of numbers are as near to them as the definition's."""
        assert_same_bits("kept bytes", got[self.is_kept], self.encoded[self.is_kept])
        new = ~self.is_kept
        if bool(new.any()):
            assert_as_near(got[new], self.encoded[new], self.numbers[new], self.mean[new], self.scale[new])


class Store:
    """Arenas on the test's device with rows of both widths in places that do not overlap, and their coding."""

    def __init__(self, device: str, dtype: torch.dtype, head_dim: int) -> None:
        self.device, self.dtype, self.head_dim = device, dtype, head_dim
        shape = (LAYERS, HEADS, head_dim)
        statistics = RowStatistics(
            *(x.to(device) for _ in "kv" for x in (5 * torch.randn(shape), torch.randn(shape).exp()))
        )
        self.k, self.v = (
            torch.full((LAYERS, SLOTS, HEADS, head_dim), torch.nan, dtype=dtype, device=device) for _ in "kv"
        )
        self.coding = RowCoding.of(self.k, statistics)
        self.cells = torch.randperm(LAYERS * SLOTS * HEADS).tolist()

    @property
    def arenas(self) -> tuple[Tensor, Tensor]:
        """Of keys and of values."""
        return self.k, self.v

    def places(self, count: int, bits: int) -> Tensor:
        """Row numbers of this width in head slots that nobody has."""
        per_slot = rows_per_slot(bits)
        cells = [self.cells.pop() for _ in range(-(-count // per_slot))]
        rows = torch.tensor([cell * per_slot + part for cell in cells for part in range(per_slot)], dtype=torch.int32)
        return rows[torch.randperm(len(rows))[:count]].to(self.device)

    def written(self, count: int, bits: int, runs: Tensor) -> Tensor:
        """Row numbers of new entries of these runs."""
        rows = self.places(count, bits)
        for is_v, arena in enumerate(self.arenas):
            mean, scale = self.coding.statistics.of_runs(runs)[is_v]
            x = (mean + scale * torch.randn(count, self.head_dim, device=self.device)).to(self.dtype)
            encoded = x.view(torch.uint8) if bits == 16 else encode_rows(x, mean, scale)
            write_rows(arena, rows, encoded, self.steps(is_v, bits))
        return rows

    def steps(self, is_v: int, bits: int) -> Tensor | None:
        """Of the rows of 4 bits."""
        return None if bits == 16 else self.coding.steps(is_v)

    def read(self, is_v: int, rows: Tensor, bits: int) -> Tensor:
        """Bytes of rows."""
        return read_rows(self.arenas[is_v], rows, self.steps(is_v, bits))

    def copies(self) -> list[Tensor]:
        """All that a call may write, as it is now: arenas, then steps."""
        return [x.clone() for x in (*self.arenas, self.coding.k_steps, self.coding.v_steps)]

    def check_rest(self, before: list[Tensor], targets: list[tuple[Tensor, int]]) -> None:
        """Nothing but these rows has changed since :meth:`copies`."""
        for is_v in (0, 1):
            for rows, bits in targets:
                steps = None if bits == 16 else before[2 + is_v]
                write_rows(before[is_v], rows, self.read(is_v, rows, bits), steps)
        for old, new in zip(before, self.copies(), strict=True):
            assert_same_bits("the rest", new, old)

    def expected(self, rows: Tensor, widths: Tensor, runs: Tensor, bits: int) -> list[Entries]:
        """Of keys and of values of entries in this width."""
        both = []
        for is_v in (0, 1):
            mean, scale = self.coding.statistics.of_runs(runs)[is_v]
            found, numbers = [], torch.zeros(len(rows), self.head_dim, dtype=self.dtype, device=self.device)
            for i, (row, width) in enumerate(zip(rows.split(1), widths.tolist(), strict=True)):
                encoded = self.read(is_v, row, width)
                if width != bits:
                    numbers[i] = encoded.view(self.dtype)[0]
                    encoded = encode_rows(numbers[i : i + 1], mean[i], scale[i])
                found.append(encoded)
            both.append(Entries(numbers, torch.cat(found), widths == bits, mean, scale))
        return both


def runs_of(count: int, device: str) -> Tensor:
    return torch.randint(LAYERS * HEADS, (count,), dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_each_width_to_each_that_is_not_larger(device: str, dtype: torch.dtype, head_dim: int) -> None:
    """Two targets in one call, from both widths in any order; nothing else is written."""
    store = Store(device, dtype, head_dim)
    counts = {16: 30, 4: 19}
    runs = [runs_of(count, device) for count in counts.values()]
    rows = [store.written(count, bits, own) for (bits, count), own in zip(counts.items(), runs, strict=True)]
    widths = torch.cat([torch.full((count,), bits) for bits, count in counts.items()]).to(device, torch.int8)
    all_rows, all_runs = torch.cat(rows), torch.cat(runs)
    entries = torch.arange(49, device=device)
    wide, narrow = entries[:13], entries[13:][torch.randperm(36, device=device)]
    order = torch.cat([wide, narrow])
    targets = [(store.places(13, 16), 16), (store.places(36, 4), 4)]
    want = [store.expected(all_rows[e], widths[e], all_runs[e], bits) for e, bits in ((wide, 16), (narrow, 4))]
    before = store.copies()
    recode_rows(store.k, store.v, all_rows[order], widths[order], all_runs[order], targets, store.coding)
    for is_v in (0, 1):
        for (places, bits), expected in zip(targets, want, strict=True):
            expected[is_v].check(store.read(is_v, places, bits))
    store.check_rest(before, targets)


@pytest.mark.parametrize("bits", [16, 4])
def test_rows_of_the_same_width_are_moved_bit_for_bit(device: str, bits: int) -> None:
    """Into places that overlap their sources in a cycle; NaN too."""
    store = Store(device, torch.bfloat16, 64)
    runs = runs_of(20, device)
    rows = store.places(20, bits)
    for is_v, arena in enumerate(store.arenas):
        content = torch.randint(256, store.read(is_v, rows, bits).shape, dtype=torch.uint8, device=device)
        write_rows(arena, rows, content, store.steps(is_v, bits))
    want = [store.read(is_v, rows, bits) for is_v in (0, 1)]
    widths = torch.full((20,), bits, dtype=torch.int8, device=device)
    recode_rows(store.k, store.v, rows, widths, runs, [(rows.roll(7), bits)], store.coding)
    for is_v, expected in enumerate(want):
        assert_same_bits("bytes", store.read(is_v, rows.roll(7), bits), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_16_bits_are_moved_without_a_coding(device: str, dtype: torch.dtype) -> None:
    """Which stand for the 32 of float32, too."""
    k, v = (torch.randn(LAYERS, SLOTS, HEADS, 48, device=device).to(dtype) for _ in "kv")
    rows = torch.arange(30, dtype=torch.int32, device=device)
    want = [read_rows(arena, rows) for arena in (k, v)]
    widths = torch.full((30,), 16, dtype=torch.int8, device=device)
    recode_rows(k, v, rows, widths, runs_of(30, device), [(rows.roll(7), 16)], None)
    for arena, expected in zip((k, v), want, strict=True):
        assert_same_bits("bytes", read_rows(arena, rows.roll(7)), expected)


def test_rows_are_packed_into_the_head_slots_they_come_from(device: str) -> None:
    """Sources and targets share cells: four rows of 4 bits lie where one of 16 was, whose entry went elsewhere."""
    store = Store(device, torch.bfloat16, 64)
    runs = runs_of(32, device)
    rows = store.written(32, 16, runs)
    cells = rows[torch.randperm(32, device=device)[:8]]
    targets = (cells[:, None] * 4 + torch.arange(4, device=device)).int().flatten()
    targets = targets[torch.randperm(32, device=device)]
    widths = torch.full((32,), 16, dtype=torch.int8, device=device)
    want = store.expected(rows, widths, runs, 4)
    recode_rows(store.k, store.v, rows, widths, runs, [(targets, 4)], store.coding)
    for is_v, expected in enumerate(want):
        expected.check(store.read(is_v, targets, 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_whose_sums_are_exact_have_the_bits_of_the_definition(device: str, dtype: torch.dtype) -> None:
    """Small integers, which the rotation of 64 channels adds up exactly in any order."""
    store = Store(device, dtype, 64)
    one = torch.ones(LAYERS, HEADS, 64, device=device)
    store.coding.statistics.assign(RowStatistics(0 * one, one, 0 * one, one))
    runs, rows = runs_of(40, device), store.places(40, 16)
    for arena in store.arenas:
        x = torch.randint(-9, 10, (40, 64), device=device).to(dtype)
        write_rows(arena, rows, x.view(torch.uint8))
    widths = torch.full((40,), 16, dtype=torch.int8, device=device)
    want = store.expected(rows, widths, runs, 4)
    for got, expected in zip(encoded_rows(*store.arenas, rows, widths, runs, store.coding), want, strict=True):
        assert_same_bits("bytes", got, expected.encoded)


def test_equal_rows_get_equal_codes_wherever_they_lie(device: str) -> None:
    """In a call, alone or among others, and in the arena."""
    store = Store(device, torch.bfloat16, 96)
    runs, rows = runs_of(40, device), store.places(40, 16)
    runs[20:] = runs[:20].flip(0)
    for arena in store.arenas:
        x = torch.randn(20, 96, device=device).to(torch.bfloat16)
        write_rows(arena, rows, torch.cat([x, x.flip(0)]).view(torch.uint8))
    widths = torch.full((40,), 16, dtype=torch.int8, device=device)
    together = encoded_rows(*store.arenas, rows, widths, runs, store.coding)
    alone = encoded_rows(*store.arenas, rows[5:6], widths[5:6], runs[5:6], store.coding)
    for all_rows, one in zip(together, alone, strict=True):
        assert_same_bits("the same rows", all_rows[20:].flip(0), all_rows[:20])
        assert_same_bits("one of them", one, all_rows[5:6])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_leave_the_arenas_encoded_and_come_back(device: str, dtype: torch.dtype) -> None:
    """The bytes are those that a move would write; nothing else of the arenas changes."""
    store = Store(device, dtype, 64)
    widths = torch.tensor([16, 4], dtype=torch.int8, device=device).repeat(20)
    runs = runs_of(40, device)
    rows = torch.cat([store.written(1, width, run) for width, run in zip(widths.tolist(), runs.split(1), strict=True)])
    want, before = store.expected(rows, widths, runs, 4), store.copies()
    out = encoded_rows(store.k, store.v, rows, widths, runs, store.coding)
    places = store.places(40, 4)
    write_encoded(store.k, store.v, places, *out, store.coding)
    for is_v, (copied, expected) in enumerate(zip(out, want, strict=True)):
        expected.check(copied)
        assert_same_bits("rows", store.read(is_v, places, 4), copied)
    store.check_rest(before, [(places, 4)])
    moved = store.places(40, 4)
    recode_rows(store.k, store.v, rows, widths, runs, [(moved, 4)], store.coding)
    for is_v, copied in enumerate(out):
        assert_same_bits("moved rows", store.read(is_v, moved, 4), copied)
    nothing = encoded_rows(store.k, store.v, rows[:0], widths[:0], runs[:0], store.coding)
    write_encoded(store.k, store.v, rows[:0], *nothing, store.coding)


def test_bad_encoded_rows_are_named() -> None:
    store = Store("cpu", torch.bfloat16, 32)
    runs = runs_of(2, "cpu")
    with pytest.raises(ValueError, match="source_bits: expected 16 or 4, got 8"):
        encoded_rows(store.k, store.v, ROWS, WIDE // 2, runs, store.coding)
    with pytest.raises(ValueError, match="source_rows: expected indices in"):
        encoded_rows(store.k, store.v, ROWS + 10_000, WIDE, runs, store.coding)
    k, v = encoded_rows(*store.arenas, ROWS, WIDE, runs, store.coding)
    other = RowCoding(store.coding.statistics, store.coding.k_steps[1:], store.coding.v_steps)
    for places, rows, coding, message in (
        (ROWS * 0, k, store.coding, "places: expected rows that are all different"),
        (ROWS - 1, k, store.coding, "places: expected indices in"),
        (ROWS, k[:, :-2], store.coding, "k: expected shape"),
        (ROWS, k, other, "k_steps: expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            write_encoded(store.k, store.v, places, rows, v, coding)


@pytest.mark.parametrize("bits", [16, 4])
def test_without_numba_torch_encodes(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Some rows at a time."""
    monkeypatch.setattr("kvevict_kernels.recode_rows.reason_not_to_run", lambda head_dim: "not installed")
    monkeypatch.setattr("kvevict_kernels.recode_rows.CHUNK_ROWS", 7)
    store = Store("cpu", torch.bfloat16, 32)
    runs = runs_of(60, "cpu")
    widths = torch.tensor([width for width in (16, 4) if width >= bits], dtype=torch.int8).repeat(60)[:60]
    rows = torch.cat([store.written(1, width, run) for width, run in zip(widths.tolist(), runs.split(1), strict=True)])
    targets = store.places(60, bits)
    want = store.expected(rows, widths, runs, bits)
    recode_rows(store.k, store.v, rows, widths, runs, [(targets, bits)], store.coding)
    for is_v, expected in enumerate(want):
        expected.check(store.read(is_v, targets, bits))


def test_what_a_cpu_runs_is_compiled_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.cache_clear()
    prepare_on_cpu(64)
    monkeypatch.setattr("kvevict_kernels.recode_rows.numba_impl.compiled", lambda *_: 1 / 0)
    store = Store("cpu", torch.bfloat16, 64)
    runs = runs_of(3, "cpu")
    rows, widths = store.written(3, 16, runs), torch.full((3,), 16, dtype=torch.int8)
    recode_rows(store.k, store.v, rows, widths, runs, [(store.places(3, 4), 4)], store.coding)


def test_the_temporary_is_given_and_holds_one_arena(device: str) -> None:
    """Parts of it begin aligned; a smaller one is refused before anything is written."""
    store = Store(device, torch.bfloat16, 32)
    runs = runs_of(12, device)
    rows, widths = store.written(12, 16, runs), torch.full((12,), 16, dtype=torch.int8, device=device)
    targets = [(store.places(7, 4), 4), (store.places(5, 16), 16)]
    assert temporary_bytes(store.k, targets) == 128 + 5 * 64
    temporary = torch.zeros(448, dtype=torch.uint8, device=device)
    before = store.k.clone()
    with pytest.raises(ValueError, match="temporary: expected 448 bytes, got 447"):
        recode_rows(store.k, store.v, rows, widths, runs, targets, store.coding, temporary[:-1])
    assert_same_bits("keys", store.k, before)
    values = [store.expected(rows[part], widths[part], runs[part], bits)[1] for part, bits in PARTS]
    recode_rows(store.k, store.v, rows, widths, runs, targets, store.coding, temporary)
    values[0].check(temporary[: 7 * 18].view(7, 18))
    values[1].check(temporary[128:].view(5, 64))


def test_whatever_is_written_is_read_as_finite_on_every_device(device: str) -> None:
    """Also rows of subnormal numbers, of none, of NaN and of infinite ones."""
    store = Store(device, torch.bfloat16, 32)
    runs = runs_of(7, device)
    rows = store.places(7, 16)
    for arena in store.arenas:
        flat = arena.view(-1, 32)
        signs = torch.linspace(-1, 1, 32, device=device).sign().to(store.dtype)
        flat[rows.long()] = torch.finfo(store.dtype).max * signs
        for i, number in enumerate((0.0, 1e-30, 1e-40, torch.nan, torch.inf, -torch.inf)):
            flat[rows[i].long()] = number
    widths = torch.full((7,), 16, dtype=torch.int8, device=device)
    targets = store.places(7, 4)
    want = store.expected(rows, widths, runs, 4)
    recode_rows(store.k, store.v, rows, widths, runs, [(targets, 4)], store.coding)
    for is_v, expected in enumerate(want):
        got = store.read(is_v, targets, 4)
        found, defined = (decode_rows(x, expected.mean, expected.scale) for x in (got, expected.encoded))
        assert found.isfinite().all()
        assert_same_bits("NaN, which is read as the mean", found[3], expected.mean[3])
        size = (defined - expected.mean).abs().amax(1, keepdim=True)
        assert ((found - defined).abs() <= 0.25 * size).all()


def test_nothing_to_do(device: str) -> None:
    store = Store(device, torch.bfloat16, 32)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    recode_rows(store.k, store.v, none, none.char(), none, [(none, 16), (none, 4)], store.coding)
    recode_rows(store.k, store.v, none, none.char(), none, [], store.coding)


PARTS = ((slice(7), 4), (slice(7, 12), 16))
ROWS = torch.tensor([0, 1], dtype=torch.int32)
WIDE = torch.tensor([16, 16], dtype=torch.int8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"source_rows": ROWS.long()}, "source_rows: expected dtype int32, got int64"),
        ({"source_bits": WIDE.int()}, "source_bits: expected dtype int8, got int32"),
        ({"source_bits": WIDE // 2}, "source_bits: expected 16 or 4, got 8"),
        ({"source_bits": WIDE // 4, "targets": [(ROWS + 8, 16)]}, "source_bits: expected 16, got 4"),
        ({"runs": ROWS + 5}, r"runs: expected indices in \[0, 6\), got 5 to 6"),
        ({"source_rows": ROWS + LAYERS * SLOTS * HEADS - 1}, r"source_rows: expected indices in \[0, 240\)"),
        ({"targets": [(ROWS, 8)]}, "targets: expected rows of 16 or 4 bits, got 8"),
        ({"targets": [(ROWS + 959, 4)]}, r"targets: expected indices in \[0, 960\), got 959 to 960"),
        ({"targets": [(ROWS * 0, 4)]}, "targets: expected rows that are all different"),
        ({"targets": [(ROWS[:1], 4)]}, r"targets: expected 2 rows, as many as source_rows, got \[1\]"),
        ({"coding": None}, "coding: rows of 4 bits need one, got None"),
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
        "targets": [(ROWS + 8, 4)],
        "coding": store.coding,
    }
    with pytest.raises(ValueError, match=message):
        recode_rows(**(arguments | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "message"),
    [
        (48, torch.bfloat16, "head_dim that is a multiple of 32, got bfloat16 and 48"),
        (32, torch.float32, "a pool of bfloat16 or float16 and .*, got float32 and 32"),
        (32, torch.float8_e4m3fn, "k_arena: expected dtype"),
    ],
    ids=str,
)
def test_pools_that_hold_no_such_rows_are_refused(head_dim: int, dtype: torch.dtype, message: str) -> None:
    arena = torch.zeros(LAYERS, SLOTS, HEADS, head_dim).to(dtype)
    ones, steps = torch.ones(LAYERS, HEADS, head_dim), torch.ones(LAYERS * SLOTS * HEADS * 4).bfloat16()
    coding = RowCoding(RowStatistics(ones, ones, ones, ones), steps, steps)
    with pytest.raises(ValueError, match=message):
        recode_rows(arena, arena.clone(), ROWS, WIDE, ROWS, [(ROWS + 8, 4)], coding)
