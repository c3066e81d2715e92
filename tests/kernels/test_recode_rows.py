from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.encoded import assert_as_near
from helpers.implementations import threads
from helpers.tolerance import assert_same_bits
from kvevict_kernels.recode_rows import encoded_rows, recode_rows, temporary_bytes, write_encoded
from kvevict_kernels.recode_rows.numba_impl import call
from kvevict_kernels.row_codec import RowCoding, RowStatistics, decode_rows, encode_rows, read_rows, write_rows
from kvevict_kernels.row_sizes import ROWS_PER_SLOT
from kvevict_kernels.span_attention import prepare_on_cpu

pytestmark = pytest.mark.usefixtures("poisoned_empty")

LAYERS, SLOTS, HEADS = 2, 40, 3
DTYPES = [torch.bfloat16, torch.float16]


class Entries:
    """What entries are to have in rows of 4 bits: of one arena, entry by entry."""

    def __init__(self, numbers: Tensor | None, encoded: Tensor, mean: Tensor, scale: Tensor) -> None:
        self.numbers, self.encoded, self.mean, self.scale = numbers, encoded, mean, scale

    def check(self, got: Tensor) -> None:
        """Bytes that are moved are the same; those of numbers are as near to them as the definition's."""
        if self.numbers is None:
            assert_same_bits("moved bytes", got, self.encoded)
        else:
            assert_as_near(got, self.encoded, self.numbers, self.mean, self.scale)


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
        per_slot = ROWS_PER_SLOT[bits]
        cells = [self.cells.pop() for _ in range(-(-count // per_slot))]
        rows = torch.tensor([cell * per_slot + part for cell in cells for part in range(per_slot)], dtype=torch.int32)
        return rows[torch.randperm(len(rows))[:count]].to(self.device)

    def written(self, count: int, bits: int, runs: Tensor) -> Tensor:
        """Row numbers of new entries of these runs."""
        rows = self.places(count, bits)
        for is_v, arena in enumerate(self.arenas):
            mean, scale = self.coding.statistics.of_runs(runs, is_v=bool(is_v))
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

    def check_rest(self, before: list[Tensor], places: Tensor) -> None:
        """Nothing but these rows of 4 bits has changed since :meth:`copies`."""
        for is_v in (0, 1):
            write_rows(before[is_v], places, self.read(is_v, places, 4), before[2 + is_v])
        for old, new in zip(before, self.copies(), strict=True):
            assert_same_bits("the rest", new, old)

    def expected(self, rows: Tensor, bits: int, runs: Tensor) -> list[Entries]:
        """Of keys and of values of entries whose rows have so many bits."""
        both = []
        for is_v in (0, 1):
            mean, scale = self.coding.statistics.of_runs(runs, is_v=bool(is_v))
            encoded, numbers = self.read(is_v, rows, bits), None
            if bits == 16:
                numbers = encoded.view(self.dtype)
                encoded = encode_rows(numbers, mean, scale)
            both.append(Entries(numbers, encoded, mean, scale))
        return both

    def recode(self, rows: Tensor, bits: int, runs: Tensor, places: Tensor) -> None:
        """Rows get 4 bits, as the definition says."""
        want = self.expected(rows, bits, runs)
        recode_rows(self.k, self.v, rows, bits, runs, places, self.coding)
        for is_v, expected in enumerate(want):
            expected.check(self.read(is_v, places, 4))


def runs_of(count: int, device: str) -> Tensor:
    return torch.randint(LAYERS * HEADS, (count,), dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("bits", [16, 4])
def test_rows_of_each_width_get_4_bits(device: str, dtype: torch.dtype, head_dim: int, bits: int) -> None:
    """In any order; nothing else is written."""
    store = Store(device, dtype, head_dim)
    runs = runs_of(49, device)
    rows = store.written(49, bits, runs)
    order = torch.randperm(49, device=device)[:36]
    places, rows, runs = store.places(36, 4), rows[order], runs[order]
    before = store.copies()
    store.recode(rows, bits, runs, places)
    store.check_rest(before, places)


def test_rows_of_4_bits_are_moved_bit_for_bit(device: str) -> None:
    """Into places that overlap their sources in a cycle; NaN too."""
    store = Store(device, torch.bfloat16, 64)
    runs = runs_of(20, device)
    rows = store.places(20, 4)
    for is_v, arena in enumerate(store.arenas):
        content = torch.randint(256, store.read(is_v, rows, 4).shape, dtype=torch.uint8, device=device)
        write_rows(arena, rows, content, store.steps(is_v, 4))
    want = [store.read(is_v, rows, 4) for is_v in (0, 1)]
    recode_rows(store.k, store.v, rows, 4, runs, rows.roll(7), store.coding)
    for is_v, expected in enumerate(want):
        assert_same_bits("bytes", store.read(is_v, rows.roll(7), 4), expected)


def test_rows_are_packed_into_the_head_slots_they_come_from(device: str) -> None:
    """Sources and places share cells: four rows of 4 bits lie where one of 16 was, whose entry went elsewhere."""
    store = Store(device, torch.bfloat16, 64)
    runs = runs_of(32, device)
    rows = store.written(32, 16, runs)
    cells = rows[torch.randperm(32, device=device)[:8]]
    places = (cells[:, None] * 4 + torch.arange(4, device=device)).int().flatten()
    places = places[torch.randperm(32, device=device)]
    store.recode(rows, 16, runs, places)


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
    want = store.expected(rows, 16, runs)
    for got, expected in zip(encoded_rows(*store.arenas, rows, 16, runs, store.coding), want, strict=True):
        assert_same_bits("bytes", got, expected.encoded)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_equal_rows_get_equal_codes_wherever_they_lie(device: str, num_threads: int) -> None:
    """In a call, alone or among others, on few threads or more than rows, and in the arena."""
    store = Store(device, torch.bfloat16, 96)
    runs, rows = runs_of(40, device), store.places(40, 16)
    runs[20:] = runs[:20].flip(0)
    for arena in store.arenas:
        x = torch.randn(20, 96, device=device).to(torch.bfloat16)
        write_rows(arena, rows, torch.cat([x, x.flip(0)]).view(torch.uint8))
    with threads(num_threads):
        together = encoded_rows(*store.arenas, rows, 16, runs, store.coding)
        alone = encoded_rows(*store.arenas, rows[5:6], 16, runs[5:6], store.coding)
    for all_rows, one in zip(together, alone, strict=True):
        assert_same_bits("the same rows", all_rows[20:].flip(0), all_rows[:20])
        assert_same_bits("one of them", one, all_rows[5:6])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [16, 4])
def test_rows_leave_the_arenas_encoded_and_come_back(device: str, dtype: torch.dtype, bits: int) -> None:
    """The bytes are those that a move would write; nothing else of the arenas changes."""
    store = Store(device, dtype, 64)
    runs = runs_of(40, device)
    rows = store.written(40, bits, runs)
    want, before = store.expected(rows, bits, runs), store.copies()
    out = encoded_rows(store.k, store.v, rows, bits, runs, store.coding)
    places = store.places(40, 4)
    write_encoded(store.k, store.v, places, *out, store.coding)
    for is_v, (copied, expected) in enumerate(zip(out, want, strict=True)):
        expected.check(copied)
        assert_same_bits("rows", store.read(is_v, places, 4), copied)
    store.check_rest(before, places)
    moved = store.places(40, 4)
    recode_rows(store.k, store.v, rows, bits, runs, moved, store.coding)
    for is_v, copied in enumerate(out):
        assert_same_bits("moved rows", store.read(is_v, moved, 4), copied)
    nothing = encoded_rows(store.k, store.v, rows[:0], bits, runs[:0], store.coding)
    write_encoded(store.k, store.v, rows[:0], *nothing, store.coding)
    recode_rows(store.k, store.v, rows[:0], bits, runs[:0], rows[:0], store.coding)
    store.check_rest(before, torch.cat([places, moved]))


def test_bad_encoded_rows_are_named() -> None:
    store = Store("cpu", torch.bfloat16, 32)
    runs = runs_of(2, "cpu")
    with pytest.raises(ValueError, match="bits: expected 16 or 4, got 8"):
        encoded_rows(store.k, store.v, ROWS, 8, runs, store.coding)
    with pytest.raises(ValueError, match="source_rows: expected indices in"):
        encoded_rows(store.k, store.v, ROWS + 10_000, 16, runs, store.coding)
    k, v = encoded_rows(*store.arenas, ROWS, 16, runs, store.coding)
    other = RowCoding(store.coding.statistics, store.coding.k_steps[1:], store.coding.v_steps)
    for places, rows, coding, message in (
        (ROWS * 0, k, store.coding, "places: expected rows that are all different"),
        (ROWS - 1, k, store.coding, "places: expected indices in"),
        (ROWS, k[:, :-2], store.coding, "k: expected shape"),
        (ROWS, k, other, "k_steps: expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            write_encoded(store.k, store.v, places, rows, v, coding)


def test_without_numba_torch_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows at a time."""
    monkeypatch.setattr("kvevict_kernels.recode_rows.reason_not_to_run", lambda head_dim: "not installed")
    monkeypatch.setattr("kvevict_kernels.recode_rows.CHUNK_ROWS", 7)
    store = Store("cpu", torch.bfloat16, 32)
    runs = runs_of(60, "cpu")
    rows, places = store.written(60, 16, runs), store.places(60, 4)
    store.recode(rows, 16, runs, places)


def test_what_a_cpu_runs_is_compiled_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call.cache_clear()
    prepare_on_cpu("recode_rows.numba_impl", 64)
    monkeypatch.setattr("kvevict_kernels.recode_rows.numba_impl.compiled", lambda *_: 1 / 0)
    store = Store("cpu", torch.bfloat16, 64)
    runs = runs_of(3, "cpu")
    recode_rows(store.k, store.v, store.written(3, 16, runs), 16, runs, store.places(3, 4), store.coding)


def test_the_temporary_is_given_and_holds_one_arena(device: str) -> None:
    """A smaller one is refused before anything is written."""
    store = Store(device, torch.bfloat16, 32)
    runs = runs_of(12, device)
    rows, places = store.written(12, 16, runs), store.places(12, 4)
    assert temporary_bytes(store.k, 12) == 12 * 18
    temporary = torch.zeros(12 * 18, dtype=torch.uint8, device=device)
    before = store.k.clone()
    with pytest.raises(ValueError, match="temporary: expected 216 bytes, got 215"):
        recode_rows(store.k, store.v, rows, 16, runs, places, store.coding, temporary[:-1])
    assert_same_bits("keys", store.k, before)
    _, values = store.expected(rows, 16, runs)
    recode_rows(store.k, store.v, rows, 16, runs, places, store.coding, temporary)
    values.check(temporary.view(12, 18))


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
    places = store.places(7, 4)
    want = store.expected(rows, 16, runs)
    recode_rows(store.k, store.v, rows, 16, runs, places, store.coding)
    for is_v, expected in enumerate(want):
        got = store.read(is_v, places, 4)
        found, defined = (decode_rows(x, expected.mean, expected.scale) for x in (got, expected.encoded))
        assert found.isfinite().all()
        assert_same_bits("NaN, which is read as the mean", found[3], expected.mean[3])
        size = (defined - expected.mean).abs().amax(1, keepdim=True)
        assert ((found - defined).abs() <= 0.25 * size).all()


ROWS = torch.tensor([0, 1], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"source_rows": ROWS.long()}, "source_rows: expected dtype int32, got int64"),
        ({"bits": 8}, "bits: expected 16 or 4, got 8"),
        ({"runs": ROWS + 5}, r"runs: expected indices in \[0, 6\), got 5 to 6"),
        ({"source_rows": ROWS + LAYERS * SLOTS * HEADS - 1}, r"source_rows: expected indices in \[0, 240\)"),
        ({"places": ROWS + 959}, r"places: expected indices in \[0, 960\), got 959 to 960"),
        ({"places": ROWS * 0}, "places: expected rows that are all different"),
        ({"places": ROWS[:1]}, "places: expected 2 rows, as many as source_rows, got 1"),
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
        "bits": 16,
        "runs": ROWS,
        "places": ROWS + 8,
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
        recode_rows(arena, arena.clone(), ROWS, 16, ROWS, ROWS + 8, coding)
