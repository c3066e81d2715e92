from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.poison import poisoned
from helpers.references import compact_kv_reference
from helpers.tolerance import assert_accurate, assert_same_bits, rounding_noise
from kvevict_kernels.compact_kv import compact_kv

pytestmark = pytest.mark.usefixtures("poisoned_empty")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# num_layers, num_token_slots, num_kv_heads, head_dim
ARENAS = [(2, 40, 3, 64), (3, 30, 5, 16), (2, 25, 7, 80), (1, 200, 1, 128)]


def arenas(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    return (torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype))


def moves(kind: str, num_rows: int, count: int) -> tuple[Tensor, Tensor]:
    """Sources and destinations that overlap in different ways."""
    if kind == "permutation":
        rows = torch.randperm(num_rows)[:count]
        return rows.int(), rows[torch.randperm(count)].int()
    if kind == "random":
        return torch.randperm(num_rows)[:count].int(), torch.randperm(num_rows)[:count].int()
    if kind == "fan-out":
        return torch.full((count,), num_rows // 2).int(), torch.randperm(num_rows)[:count].int()
    up = torch.arange(1, count + 1).int()
    down = torch.arange(count).int()
    return {"shift-down": (up, down), "shift-up": (down, up), "fixed": (up, up)}[kind]


def ragged_runs(num_rows: int, num_out: int, device: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """src, dst, and indptr and weights: runs of 0 to 4 sources, a long one, and overlapping rows."""
    lens = torch.randint(0, 5, (num_out,))
    if num_out > 3:
        lens[0], lens[num_out // 2] = 0, 37
    indptr = torch.cat([torch.zeros(1), lens.cumsum(0)]).int()
    src = torch.randint(num_rows, (int(lens.sum()),)).int()
    weights = torch.rand(src.numel()) / lens.clamp_min(1).repeat_interleave(lens)
    dst = torch.randperm(num_rows)[:num_out].int()
    return src.to(device), dst.to(device), {"indptr": indptr.to(device), "weights": weights.to(device)}


def check_moves(k: Tensor, v: Tensor, src: Tensor, dst: Tensor, move: Callable[..., None] = compact_kv) -> None:
    """Rows have the bits that the reference gives them."""
    want_k, want_v = k.clone(), v.clone()
    compact_kv_reference(want_k, want_v, src, dst)
    move(k, v, src, dst)
    assert_same_bits("k_arena", k, want_k)
    assert_same_bits("v_arena", v, want_v)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("count", [0, 1, 63, 100])
@pytest.mark.parametrize("shape", ARENAS, ids=str)
def test_move_matches_reference(device, shape, count, dtype):
    k, v = arenas(shape, dtype, device)
    check_moves(k, v, *(x.to(device) for x in moves("random", shape[0] * shape[1] * shape[2], count)))


@pytest.mark.parametrize("width", [24, 576])
def test_rows_with_values_inside_move_once(device, width):
    k, v = arenas((2, 20, 1, width), torch.bfloat16, device)
    src, dst = (x.to(device) for x in moves("permutation", 40, 30))
    want = k.clone()
    compact_kv_reference(want, v, src, dst)
    compact_kv(k, k[..., :0], src, dst)
    assert_same_bits("k_arena", k, want)


def test_rows_with_values_inside_are_summed_once(device):
    k, v = arenas((2, 20, 1, 576), torch.float32, device)
    src, dst, sums = ragged_runs(40, 12, device)
    want = k.clone()
    compact_kv_reference(want, v, src, dst, **sums)
    compact_kv(k, k[..., :0], src, dst, **sums)
    assert_accurate("k_arena", k, want, want, noise=2.0**-20)


@pytest.mark.parametrize("kind", ["permutation", "random", "fan-out", "shift-down", "shift-up", "fixed"])
def test_any_overlap_reads_old_rows(device, kind):
    k, v = arenas((2, 50, 3, 64), torch.bfloat16, device)
    check_moves(k, v, *(x.to(device) for x in moves(kind, 300, 200)))


@pytest.mark.parametrize("limit", [1, 200, 3000])
@pytest.mark.parametrize("weighted", [False, True])
def test_groups_of_the_cpu_path_do_not_show(monkeypatch, weighted, limit):
    """Column by column and run by run as well: bit for bit what whole rows give."""
    k, v = arenas((2, 50, 3, 64), torch.bfloat16, "cpu")
    src, dst, sums = ragged_runs(300, 90, "cpu") if weighted else (*moves("random", 300, 200), {})
    want_k, want_v = k.clone(), v.clone()
    compact_kv(want_k, want_v, src, dst, **sums)
    monkeypatch.setattr("kvevict_kernels.compact_kv.TEMPORARY_BYTES", limit)
    compact_kv(k, v, src, dst, **sums)
    assert_same_bits("k_arena", k, want_k)
    assert_same_bits("v_arena", v, want_v)


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_that_take_no_part_are_neither_read_nor_written(device, weighted):
    """All rows are NaN but the sources: one stray read spoils a result, one stray write a NaN."""
    rows = torch.randperm(240)
    src, dst = rows[:70].int().to(device), rows[30:100].int().to(device)  # 40 rows are both
    live = torch.randn(70, 64, device=device).bfloat16()
    k = poisoned(2, 40, 3, 64, dtype=torch.bfloat16, device=device)
    k.view(240, 64)[src.long()] = live
    before = k.clone()
    ones = {"indptr": torch.arange(71, dtype=torch.int32, device=device), "weights": torch.ones(70, device=device)}
    compact_kv(k, k.clone(), src, dst, **(ones if weighted else {}))
    before.view(240, 64)[dst.long()] = live
    assert_same_bits("k_arena", k, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_out", [0, 1, 63, 100])
@pytest.mark.parametrize("shape", ARENAS[:3], ids=str)
def test_weighted_sums_match_reference(device, interpreted, shape, num_out, dtype):
    num_rows = shape[0] * shape[1] * shape[2]
    k, v = arenas(shape, dtype, device)
    src, dst, sums = ragged_runs(num_rows, num_out, device)
    exact = [arena.float() for arena in (k, v)]
    compact_kv_reference(*exact, src, dst, **sums)
    baseline = [arena.clone() for arena in (k, v)]  # float32 sums, one rounding: the best a dtype can do
    compact_kv_reference(*baseline, src, dst, **sums)
    compact_kv(k, v, src, dst, **sums)
    for name, got, want, base in zip(("k_arena", "v_arena"), (k, v), exact, baseline, strict=True):
        assert_accurate(name, got, want, base, noise=rounding_noise(dtype, interpreted))
        untouched = torch.ones(num_rows, dtype=torch.bool, device=device).index_fill_(0, dst.long(), False)
        assert_same_bits(name, got.view(num_rows, -1)[untouched], base.view(num_rows, -1)[untouched])


def test_weighted_sums_of_float8_are_rounded_once(device, interpreted):
    """To the nearest of 4 bits. Triton's interpreter forgets carries, so it gets sums that need no rounding."""
    k, v = arenas((2, 30, 3, 16), torch.float8_e4m3fn, device)
    src, dst, sums = ragged_runs(180, 90, device)
    if interpreted:
        k, v = (arena.float().sign().to(arena.dtype) for arena in (k, v))
        sums["weights"].fill_(0.25)  # up to 37 times +-1: even quarters where they are large
        src[1::2] = src[::2][: src[1::2].numel()]
    exact = [arena.float() for arena in (k, v)]
    compact_kv_reference(*exact, src, dst, **sums)
    compact_kv(k, v, src, dst, **sums)
    for got, want in zip((k, v), exact, strict=True):
        torch.testing.assert_close(got.float(), want, rtol=2.0**-4, atol=2.0**-9)


def test_empty_runs_write_zeros(device):
    k, v = arenas((1, 4, 1, 16), torch.float16, device)
    empty = torch.empty(0, dtype=torch.int32, device=device)
    indptr = torch.zeros(3, dtype=torch.int32, device=device)
    dst = torch.tensor([3, 1], dtype=torch.int32, device=device)
    compact_kv(k, v, empty, dst, indptr=indptr, weights=empty.float())
    assert not k[0, [1, 3]].any()
    assert not v[0, [1, 3]].any()
    assert k[0, [0, 2]].all()


def test_worked_merge(device):
    """Row 2 becomes 1 * row 2 + 0.5 * row 0, row 0 becomes the old row 2."""
    k = torch.tensor([[2.0], [3.0], [5.0]], device=device).view(1, 3, 1, 1)
    v = -k.clone()
    src, dst = torch.tensor([2, 0, 2], device=device).int(), torch.tensor([2, 0], device=device).int()
    weights = torch.tensor([1.0, 0.5, 1.0], device=device)
    compact_kv(k, v, src, dst, indptr=torch.tensor([0, 2, 3], device=device).int(), weights=weights)
    assert k.flatten().tolist() == [5.0, 3.0, 6.0]
    assert v.flatten().tolist() == [-5.0, -3.0, -6.0]


def test_two_sums_give_the_same_bits(device):
    k, v = arenas((2, 40, 3, 64), torch.bfloat16, device)
    src, dst, sums = ragged_runs(240, 100, device)
    results = []
    for _ in range(2):
        results.append((k.clone(), v.clone()))
        compact_kv(*results[-1], src, dst, **sums)
    assert_same_bits("k_arena", results[0][0], results[1][0])
    assert_same_bits("v_arena", results[0][1], results[1][1])


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("weighted", [False, True])
def test_column_groups_change_nothing(triton_device, weighted, head_dim):
    """A temporary that holds a part of each row gives the same bytes as one that holds whole rows."""
    from kvevict_kernels.compact_kv.triton_impl import column_groups, compact_kv_triton

    k, v = arenas((2, 40, 3, head_dim), torch.bfloat16, triton_device)
    src, dst, sums = ragged_runs(240, 70, triton_device)
    args = (src, dst, *sums.values()) if weighted else (src[:70], dst, None, None)
    whole, parts = (k.clone(), v.clone()), (k.clone(), v.clone())
    compact_kv_triton(*whole, *args)
    limit = 70 * 64  # bytes: two sectors per row
    assert column_groups(70, head_dim, 2, limit)[:2] == [(0, 32), (32, 32)]
    assert sum(width for _, width in column_groups(70, head_dim, 2, limit)) == head_dim
    assert column_groups(70, 128, 2, 70 * 5 * 32) == [(0, 64), (64, 64)]  # even, not 80 and 48
    compact_kv_triton(*parts, *args, staging_bytes=limit)
    assert_same_bits("k_arena", parts[0], whole[0])
    assert_same_bits("v_arena", parts[1], whole[1])


HELD = 10


def packing(sources: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Fill 55 of the 60 rows of ten token slots of a [2, 50, 3, 64] arena, as packing a prefix does.

    Rows from inside come from the next one, so a row that is written in the same launch may be what another one needs.

    Returns:
        src, dst, and [55], bool: which sources lie in the ten token slots.
    """
    rows = torch.arange(300).view(2, 50, 3)[:, torch.randperm(50)]
    inside = rows[:, :HELD].flatten()
    outside = rows[:, HELD:].flatten()[torch.randperm(240)[:60]]
    from_inside = {"inside": torch.ones(55), "outside": torch.zeros(55), "both": torch.arange(55) % 2}[sources].bool()
    src = torch.where(from_inside, inside.roll(-1)[:55], outside[:55])
    return src.int().to(device), inside[:55].int().to(device), from_inside.to(device)


@pytest.mark.parametrize("limit", [2**20, 55 * 64], ids=["whole rows", "column groups"])
@pytest.mark.parametrize("row_block", [1, 16, 64])
@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
@pytest.mark.parametrize("sources", ["inside", "outside", "both"])
def test_order_of_programs_does_not_matter(monkeypatch, triton_device, sources, order, row_block, limit):
    """The interpreter runs programs in order, so the rows are permuted instead."""
    from kvevict_kernels.compact_kv import triton_impl

    k, v = arenas((2, 50, 3, 64), torch.bfloat16, triton_device)
    src, dst, _ = packing(sources, triton_device)
    count = torch.arange(55, device=triton_device)
    at = {"forward": count, "backward": count.flip(0), "shuffled": count[torch.randperm(55)]}[order]
    monkeypatch.setattr(triton_impl, "ROW_BLOCK", row_block)
    staged = partial(triton_impl.compact_kv_triton, indptr=None, weights=None, staging_bytes=limit)
    check_moves(k, v, src[at], dst[at], staged)


def kinds(src: Tensor, dst: Tensor, arena: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of the moves into holes, of the staged ones and of the others."""
    from kvevict_kernels.compact_kv.triton_impl import DIRECT, HOLE, STAGED, kinds_of_moves

    found = kinds_of_moves(src, dst, *arena.shape[:3])
    return found == HOLE.value, found == STAGED.value, found == DIRECT.value


@pytest.mark.parametrize("sources", ["inside", "outside", "both"])
def test_rows_are_moved_by_the_launch_that_may(monkeypatch, triton_device, sources):
    """Poison between the launches: the second may read no row that it writes, and no unused part of the temporary.

    The first one writes holes only: rows that no move reads.
    """
    from kvevict_kernels.compact_kv import triton_impl

    k, v = arenas((2, 50, 3, 64), torch.bfloat16, triton_device)
    src, dst, from_inside = packing(sources, triton_device)
    hole, staged, direct = kinds(src, dst, k)
    assert torch.equal(hole, torch.isin(dst, src).logical_not())
    assert torch.equal(staged, from_inside & ~hole)
    assert torch.equal(direct, ~hole & ~staged)
    old, want = (k.clone(), v.clone()), (k.clone(), v.clone())
    compact_kv_reference(*want, src, dst)
    before_writing: list[tuple[Tensor, Tensor]] = []

    class PoisonFirst:
        kernel = triton_impl._write_kernel

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(rows: Tensor, staging: Tensor, *args: Any, **sizes: Any) -> None:
                before_writing.append((rows.clone(), staging.view(55, 64).clone()))
                rows.view(300, 64)[dst[~hole].long()] = torch.nan
                self.kernel[grid](rows, staging, *args, **sizes)

            return launch

    monkeypatch.setattr(triton_impl, "_write_kernel", PoisonFirst())
    triton_impl.compact_kv_triton(k, v, src, dst, None, None)
    assert len(before_writing) == 2
    for name, got, wanted, first, (rows, staging) in zip("kv", (k, v), want, old, before_writing, strict=True):
        assert_same_bits(f"{name}_arena", got, wanted)
        first.view(300, 64)[dst[hole].long()] = wanted.view(300, 64)[dst[hole].long()]
        assert_same_bits(f"{name}_arena after the first launch", rows, first)
        is_filled = staging.isnan().logical_not()
        assert torch.equal(is_filled, staged[:, None].expand(55, 64))


def test_few_rows_of_a_packed_prefix_go_through_the_temporary(triton_device):
    """A fifth of each run, packed run after run into the first fifth of the token slots: a fifth of a fifth."""
    num_layers, num_tokens, num_kv_heads = 4, 1000, 2
    rows = torch.arange(num_layers * num_tokens * num_kv_heads).view(num_layers, num_tokens, num_kv_heads)
    runs = rows.transpose(1, 2).flatten(0, 1)  # the rows of a layer and head, token after token
    src = torch.cat([run[torch.randperm(num_tokens)[:200].sort().values] for run in runs]).int().to(triton_device)
    dst = rows[:, :200].flatten().int().to(triton_device)
    arena = torch.empty(num_layers, num_tokens, num_kv_heads, 1, device=triton_device)
    hole, staged, direct = (float(mask.float().mean()) for mask in kinds(src, dst, arena))
    assert 0.75 < hole < 0.85 and 0.02 < staged < 0.06 and 0.12 < direct < 0.2


def test_moves_to_more_token_slots_than_they_fill(triton_device):
    """Flags are as many as the moves; what has none counts as a source, and all arrives."""
    k, v = arenas((2, 60, 3, 16), torch.float16, triton_device)
    dst = (3 * torch.randperm(60)[:30]).int().to(triton_device)  # a row of each of 30 token slots
    src = torch.cat([dst[:10].flip(0), dst[10:] + 1])
    hole, staged, _ = kinds(src, dst, k)
    assert not hole[torch.isin(dst, src)].any() and staged.any()
    check_moves(k, v, src, dst)


K = torch.zeros(1, 4, 2, 8)
I2 = torch.tensor([1, 2], dtype=torch.int32)
PTR = torch.tensor([0, 1, 2], dtype=torch.int32)
W2 = torch.ones(2)


@pytest.mark.parametrize(
    ("args", "extra", "message"),
    [
        ((K[0], K[0], I2, I2), {}, r"k_arena: expected shape \[any, any, any, any\], got \[4, 2, 8\]"),
        ((K.int(), K, I2, I2), {}, "k_arena: expected dtype .* or float32 or float8_e4m3fn, got int32"),
        ((K.transpose(1, 2), K, I2, I2), {}, "k_arena: expected a contiguous tensor"),
        ((K, K[..., :4], I2, I2), {}, r"v_arena: expected shape \[1, 4, 2, 8\]"),
        ((K, K.half(), I2, I2), {}, "v_arena: expected dtype float32"),
        ((K, K, I2.long(), I2), {}, "src: expected dtype int32"),
        ((K, K, I2 + 6, I2), {}, r"src: expected indices in \[0, 8\), got 7 to 8"),
        ((K, K, I2, I2[:1]), {}, r"dst: expected shape \[2\], got \[1\]"),
        ((K, K, I2, I2 - 2), {}, r"dst: expected indices in \[0, 8\), got -1 to 0"),
        ((K, K, I2, I2 // 2 * 0), {}, "dst: expected head slots that are all different"),
        ((K, K, I2, I2), {"indptr": PTR}, "expected both or neither, got indptr only"),
        ((K, K, I2, I2), {"weights": W2}, "expected both or neither, got weights only"),
        ((K, K, I2, I2), {"indptr": PTR[:2], "weights": W2}, r"indptr: expected shape \[3\]"),
        ((K, K, I2, I2), {"indptr": PTR, "weights": W2.half()}, "weights: expected dtype float32"),
        ((K, K, I2, I2), {"indptr": PTR + 1, "weights": W2}, "indptr: expected to ascend from 0 to 2, got 1"),
        ((K, K, I2, I2), {"indptr": PTR * 3 % 5, "weights": W2}, "indptr: expected to ascend from 0 to 2"),
    ],
)
def test_bad_arguments_are_named(args, extra, message):
    with pytest.raises(ValueError, match=message):
        compact_kv(*args, **extra)
