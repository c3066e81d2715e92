from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.hopper import ptx_of
from helpers.tolerance import assert_accurate, assert_same_bits, rounding_noise
from kvevict_kernels.ragged_attention import cpu as cpu_path
from kvevict_kernels.ragged_attention import (
    plan_ragged_attention,
    ragged_attention,
    ragged_attention_reference,
    run_ragged_attention,
)
from kvevict_kernels.ragged_attention.tiles import BLOCK_SIZES, build_tiles, choose_block, merge_table

OP = "ragged_attention"
pytestmark = pytest.mark.usefixtures("poisoned_empty")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LSE_NOISE = 2e-6
"""Difference of two float32 softmaxes over up to 600 keys, relative to the largest lse."""


def units(q_lists: list[list[int]], kv_lens: list[int], num_kv_rows: int, device: str) -> dict[str, Tensor]:
    """Index lists; each unit reads random KV rows, no row twice, from the first half of the arena."""
    kv_lists = [torch.randperm(num_kv_rows // 2)[:length] for length in kv_lens]
    lists = {
        "qo_indptr": torch.tensor([0, *map(len, q_lists)]).cumsum(0),
        "qo_indices": torch.tensor([row for rows in q_lists for row in rows], dtype=torch.int64),
        "kv_indptr": torch.tensor([0, *kv_lens]).cumsum(0),
        "kv_indices": torch.cat([torch.empty(0, dtype=torch.int64), *kv_lists]),
    }
    return {name: x.int().to(device) for name, x in lists.items()}


def rows(num_rows: int, num_kv_rows: int, head_dim: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """q, K and V; the second half of K and V is NaN."""
    q, k, v = (torch.randn(n, head_dim) for n in (num_rows, num_kv_rows, num_kv_rows))
    k[num_kv_rows // 2 :] = v[num_kv_rows // 2 :] = float("nan")
    return tuple(x.to(device, dtype) for x in (q, k, v))


def plain_attention(q: Tensor, k_rows: Tensor, v_rows: Tensor, sm_scale: float, **lists: Tensor) -> Tensor:
    """Baseline: PyTorch's attention in the dtype of the inputs, row by row."""
    keys: list[list[int]] = [[] for _ in q]
    q_ends, kv_ends = lists["qo_indptr"].tolist(), lists["kv_indptr"].tolist()
    for u in range(len(q_ends) - 1):
        for row in lists["qo_indices"][q_ends[u] : q_ends[u + 1]].tolist():
            keys[row] += lists["kv_indices"][kv_ends[u] : kv_ends[u + 1]].tolist()
    out = torch.zeros_like(q)
    for row, mine in enumerate(keys):
        if mine:
            state = (x[None, None] for x in (q[row : row + 1], k_rows[mine], v_rows[mine]))
            out[row] = torch.nn.functional.scaled_dot_product_attention(*state, scale=sm_scale)[0, 0, 0]
    return out


def check(args: tuple[Tensor, ...], lists: dict[str, Tensor], *, interpreted: bool) -> tuple[Tensor, Tensor]:
    sm_scale = args[0].shape[1] ** -0.5
    out, lse = ragged_attention(*args, **lists, sm_scale=sm_scale)
    exact = [x.float() for x in args]
    want_out, want_lse = ragged_attention_reference(*exact, **lists, sm_scale=sm_scale)
    baseline = plain_attention(*args, sm_scale=sm_scale, **lists)
    assert out.dtype == args[0].dtype
    assert lse.dtype == torch.float32
    assert_accurate("out", out, want_out, baseline, noise=rounding_noise(out.dtype, interpreted))
    idle = want_lse.isinf()
    assert torch.equal(lse.isneginf(), idle)
    assert not out[idle].any()
    assert_accurate("lse", lse[~idle], want_lse[~idle], want_lse[~idle], noise=LSE_NOISE)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 100, 600])
def test_one_unit(device: str, interpreted: bool, length: int, dtype: torch.dtype) -> None:
    args = rows(3, 1200, 64, dtype, device)
    check(args, units([[0, 2]], [length], 1200, device), interpreted=interpreted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_a_row_in_several_units_sees_their_union(
    device: str, interpreted: bool, head_dim: int, dtype: torch.dtype
) -> None:
    """Runs of very uneven length, one of them empty; row 4 only in an empty unit, row 5 in none."""
    args = rows(7, 300, head_dim, dtype, device)
    lists = units([[0, 1, 2, 3, 6], [2], [1, 0, 6], [4], [], [3, 2, 1]], [100, 1, 63, 0, 20, 7], 300, device)
    check(args, lists, interpreted=interpreted)


@pytest.mark.parametrize(("num_heads", "group"), [(1, 1), (3, 3), (5, 7), (2, 5)])
def test_decode_step_with_shared_prefix(device: str, interpreted: bool, num_heads: int, group: int) -> None:
    """Three requests on one prefix, one unit per KV head; each has a suffix of its own."""
    num_rows = 3 * num_heads * group
    by_head = torch.arange(num_rows).view(3, num_heads, group)
    prefix = [by_head[:, h].flatten().tolist() for h in range(num_heads)]
    suffix = [by_head[r, h].tolist() for r in range(3) for h in range(num_heads)]
    lens = [37 * (h + 1) % 130 for h in range(num_heads)] + [1 + 9 * i % 40 for i in range(len(suffix))]
    args = rows(num_rows, 400, 32, torch.bfloat16, device)
    check(args, units(prefix + suffix, lens, 400, device), interpreted=interpreted)


def test_units_wider_than_a_row_block(device: str, interpreted: bool) -> None:
    args = rows(150, 200, 16, torch.float16, device)
    lists = units([list(range(150)), list(range(100, 30, -1)), [5]], [70, 100, 3], 200, device)
    check(args, lists, interpreted=interpreted)


@pytest.mark.parametrize(("num_rows", "q_lists", "kv_lens"), [(0, [], []), (4, [], []), (4, [[0], []], [0, 5])])
def test_nothing_to_attend_to(device: str, num_rows: int, q_lists: list[list[int]], kv_lens: list[int]) -> None:
    args = rows(num_rows, 20, 16, torch.bfloat16, device)
    out, lse = ragged_attention(*args, **units(q_lists, kv_lens, 20, device), sm_scale=0.25)
    assert_same_bits("out", out, torch.zeros_like(args[0]))
    assert lse.shape == (num_rows,)
    assert lse.isneginf().all()


def test_worked_example(device: str) -> None:
    """Weights 1, 2, 4 in one softmax, though two units list the keys; 4 / 7 of row 0's output is key 2's."""
    q = torch.tensor([[1.0, 0.0], [0.0, 0.0]], device=device)
    k = torch.tensor([[0.0, 9.0], [2.0, 9.0], [4.0, 9.0]], device=device).mul(torch.tensor(2.0).log())
    v = torch.tensor([[7.0, 0.0], [0.0, 7.0], [7.0, 7.0]], device=device)
    lists = {"qo_indptr": [0, 2, 3], "qo_indices": [0, 1, 0], "kv_indptr": [0, 2, 3], "kv_indices": [0, 1, 2]}
    index = {name: torch.tensor(x, device=device) for name, x in lists.items()}
    out, lse = ragged_attention(q, k, v, **index, sm_scale=0.5)
    torch.testing.assert_close(out.cpu(), torch.tensor([[5.0, 6.0], [3.5, 3.5]]))
    torch.testing.assert_close(lse.cpu(), torch.tensor([7.0, 2.0]).log())


def test_a_plan_serves_other_rows(device: str) -> None:
    lists = units([[0, 1, 2], [2, 3]], [50, 9], 120, device)
    plan = plan_ragged_attention(**lists, num_rows=4)
    for _ in range(2):
        args = rows(4, 120, 16, torch.float32, device)
        got = run_ragged_attention(plan, *args, sm_scale=0.3)
        want = ragged_attention(*args, **lists, sm_scale=0.3)
        assert_same_bits("out", got[0], want[0])
        assert_same_bits("lse", got[1], want[1])


def test_rows_beyond_32_bit_offsets(device: str, interpreted: bool) -> None:
    """Row times head_dim passes 2**31. A fresh map is virtual memory: only the rows that are read get to exist."""
    if interpreted:
        pytest.skip("the interpreter touches whole tensors")
    num_rows = 2**31 // 64 + 8
    if device == "cpu":
        arena = torch.frombuffer(mmap.mmap(-1, num_rows * 128), dtype=torch.float16).view(num_rows, 64)
    else:
        arena = torch.zeros(num_rows, 64, dtype=torch.float16, device=device)
    arena[-8:] = torch.randn(8, 64)
    q = torch.randn(2, 64, device=device).half()
    lists = units([[0, 1]], [8], 16, device)
    want = ragged_attention(q, arena[-8:].clone(), arena[-8:].clone(), **lists, sm_scale=0.125)
    lists["kv_indices"] += num_rows - 8
    got = ragged_attention(q, arena, arena, **lists, sm_scale=0.125)
    assert_same_bits("out", got[0], want[0])
    assert_same_bits("lse", got[1], want[1])


def test_passes_of_the_cpu_path_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    args = rows(6, 2000, 64, torch.bfloat16, "cpu")
    lists = units([[0, 1, 2], [2, 3, 4, 5]], [900, 350], 2000, "cpu")
    whole = ragged_attention(*args, **lists, sm_scale=0.125)
    monkeypatch.setattr(cpu_path, "PASS_BYTES", 1)
    parts = ragged_attention(*args, **lists, sm_scale=0.125)
    assert_same_bits("out", parts[0], whole[0])
    assert_same_bits("lse", parts[1], whole[1])


def test_two_calls_give_the_same_bits(device: str) -> None:
    args = rows(6, 500, 64, torch.bfloat16, device)
    lists = units([[0, 1, 2], [2, 3, 4, 5]], [200, 100], 500, device)
    first, second = (ragged_attention(*args, **lists, sm_scale=0.125) for _ in range(2))
    assert_same_bits("out", first[0], second[0])
    assert_same_bits("lse", first[1], second[1])


def test_tiles_by_hand() -> None:
    """Two layers of two units, blocks of 2, tiles of 2 lanes; layer 1 needs a filler block."""
    q_table = torch.tensor([[0, 1], [2, -1], [0, 1], [2, -1]])
    lens = torch.tensor([3, 2, 0, 1])
    starts = torch.tensor([0, 3, 5, 5])
    tiles, counts = build_tiles(q_table, starts, lens, torch.arange(10, 16), block=2, lanes=2, num_groups=2)
    assert counts == [2, 1]
    assert tiles.kv_rows.tolist() == [[[10, 12], [11, 12]], [[13, 13], [14, 14]], [[15, 15], [15, 15]]]
    assert tiles.owners.tolist() == [[[0, 0], [1, 1]], [[2, -1], [-1, -1]], [[2, -1], [-1, -1]]]
    assert tiles.q_rows.tolist() == [[[0, 0], [1, 1]], [[2, 2], [2, 2]], [[2, 2], [2, 2]]]
    hidden = tiles.mask.isneginf().squeeze(2)
    assert hidden.tolist() == [
        [[False, False], [False, True]],
        [[False, False], [False, False]],
        [[False, True], [False, True]],
    ]


def test_merge_table_by_hand() -> None:
    table, counts = merge_table(torch.tensor([2, -1, 0, 2, 2, -1]), 4)
    assert counts.tolist() == [1, 0, 3, 0]
    assert table.tolist() == [[2, 2, 2], [0, 0, 0], [0, 3, 4], [0, 0, 0]]
    assert merge_table(torch.tensor([-1]), 2)[0].shape == (2, 0)


def test_block_choice_follows_the_lengths() -> None:
    assert choose_block(torch.tensor([[20, 30, 10]])) == BLOCK_SIZES[0]
    assert choose_block(torch.full((30, 64), 8192)) == BLOCK_SIZES[-1]


Q, KV = torch.zeros(4, 8), torch.zeros(9, 8)
LISTS = {
    "qo_indptr": torch.tensor([0, 2, 3]),
    "qo_indices": torch.tensor([0, 3, 1]),
    "kv_indptr": torch.tensor([0, 1, 4]),
    "kv_indices": torch.tensor([8, 0, 1, 2]),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, r"q: expected shape \[any, any\], got \[8\]"),
        ({"q": Q.int()}, "q: expected dtype bfloat16 or float16 or float32, got int32"),
        ({"k_rows": KV.half()}, "k_rows: expected dtype float32, got float16"),
        ({"k_rows": KV[:, :4].contiguous()}, r"k_rows: expected shape \[any, 8\], got \[9, 4\]"),
        ({"v_rows": KV[:8]}, r"v_rows: expected shape \[9, 8\], got \[8, 8\]"),
        ({"qo_indptr": LISTS["qo_indptr"][:0]}, "qo_indptr: expected at least one element"),
        ({"qo_indptr": torch.tensor([0, 2, 2])}, "qo_indptr: expected ascending offsets from 0 to 3, got 0 to 2"),
        ({"kv_indptr": torch.tensor([0, 5, 4])}, "kv_indptr: expected ascending offsets"),
        ({"kv_indptr": torch.tensor([0, 4])}, r"kv_indptr: expected shape \[3\], got \[2\]"),
        ({"qo_indices": torch.tensor([0, 4, 1])}, r"qo_indices: expected indices in \[0, 4\), got 0 to 4"),
        ({"kv_indices": torch.tensor([9, 0, 1, 2])}, r"kv_indices: expected indices in \[0, 9\), got 0 to 9"),
        ({"kv_indices": LISTS["kv_indices"].float()}, "kv_indices: expected dtype int32 or int64, got float32"),
        ({"sm_scale": 0.0}, "sm_scale: expected a finite number > 0"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"q": Q, "k_rows": KV, "v_rows": KV, **LISTS, "sm_scale": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        ragged_attention(**call)


def test_a_plan_for_other_rows_is_refused() -> None:
    plan = plan_ragged_attention(**LISTS, num_rows=4)
    with pytest.raises(ValueError, match=r"q: expected shape \[4, any\], got \[3, 8\]"):
        run_ragged_attention(plan, Q[:3], KV, KV, sm_scale=1.0)


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Tensor cores, 16-byte loads, and loads that run ahead; the interpreter says nothing about these."""
    module = "kvevict_kernels.ragged_attention.triton_impl:"
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16")
    pointers |= {"work_ptr": "*i64", "qo_indices_ptr": "*i32", "kv_indices_ptr": "*i32"}
    results = {"out_ptr": "*fp32", "lse_ptr": "*fp32"}
    sizes = {"num_work": "i32", "scale_log2": "fp32", "D": 128, "BLOCK_N": 64, "BLOCK_D": 128, "UPCAST": False}
    partial = {"kernel": module + "_partial_kernel", "args": pointers | results | sizes}
    merge = {"partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32", "merge_indptr_ptr": "*i64"}
    merge |= {"merge_indices_ptr": "*i64", "out_ptr": "*bf16", "lse_ptr": "*fp32"}
    specs: list[dict[str, Any]] = [{**partial, "args": partial["args"] | {"BLOCK_M": rows}} for rows in (16, 32, 64)]
    specs.append({"kernel": module + "_merge_kernel", "args": merge | {"D": 128, "BLOCK_D": 128}})
    for code in ptx_of(specs, str(tmp_path))[:3]:
        assert "mma" in code
        assert "cp.async" in code
        assert "ld.global.v4.b32" in code
