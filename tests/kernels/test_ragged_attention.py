from __future__ import annotations

import mmap
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from helpers.tolerance import assert_accurate, assert_same_bits, rounding_noise
from kvevict_kernels.ragged_attention import cpu
from kvevict_kernels.ragged_attention.cpu import Scratch, attend_tiles, merge_partials
from kvevict_kernels.ragged_attention.reference import ragged_attention_reference
from kvevict_kernels.ragged_attention.tiles import BLOCK_SIZES, Tiles, build_tiles, choose_block, merge_table

pytestmark = pytest.mark.usefixtures("poisoned_empty")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LSE_NOISE = 2e-6
"""Difference of two float32 softmaxes over up to 600 keys, relative to the largest lse."""


def units(q_lists: list[list[int]], kv_lens: list[int], num_kv_rows: int) -> dict[str, Tensor]:
    """Index lists; each unit reads random KV rows, no row twice, from the first half of the arena."""
    kv_lists = [torch.randperm(num_kv_rows // 2)[:length] for length in kv_lens]
    lists = {
        "qo_indptr": torch.tensor([0, *map(len, q_lists)]).cumsum(0),
        "qo_indices": torch.tensor([row for rows in q_lists for row in rows], dtype=torch.int64),
        "kv_indptr": torch.tensor([0, *kv_lens]).cumsum(0),
        "kv_indices": torch.cat([torch.empty(0, dtype=torch.int64), *kv_lists]),
    }
    return {name: x.int() for name, x in lists.items()}


def rows(num_rows: int, num_kv_rows: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, K and V; the second half of K and V is NaN."""
    q, k, v = (torch.randn(n, head_dim) for n in (num_rows, num_kv_rows, num_kv_rows))
    k[num_kv_rows // 2 :] = v[num_kv_rows // 2 :] = float("nan")
    return tuple(x.to(dtype) for x in (q, k, v))


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


@dataclass(frozen=True)
class Plan:
    """Tiles of all units, and how their partials are merged."""

    tiles: list[Tiles]
    table: Tensor
    bias: Tensor | None
    counts: Tensor

    def attend(
        self, q: Tensor, k_rows: Tensor, v_rows: Tensor, sm_scale: float, scratch: Scratch | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp; meaningless for a row that attends to nothing."""
        scratch = scratch or Scratch()
        partials = []
        for tiles in self.tiles:
            partials.extend(attend_tiles(tiles, q.float(), k_rows, v_rows, sm_scale, scratch))
        out, lse = merge_partials(partials, self.table, self.bias)
        return out.to(q.dtype), lse


def plan(num_rows: int, *, qo_indptr: Tensor, qo_indices: Tensor, kv_indptr: Tensor, kv_indices: Tensor) -> Plan:
    """Units of one q row go together, and so do those of several, which are padded to the widest."""
    q_rows = [qo_indices[start:end].long() for start, end in pairwise(qo_indptr.tolist())]
    kv_lens = kv_indptr.diff().long()
    all_tiles = []
    for widths in (range(1, 2), range(2, num_rows + 1)):
        mine = [u for u, rows in enumerate(q_rows) if len(rows) in widths]
        if mine:
            q_table = pad_sequence([q_rows[u] for u in mine], batch_first=True, padding_value=-1)
            block = choose_block(kv_lens[None, mine])
            tiles, counts = build_tiles(q_table, kv_indptr[mine].long(), kv_lens[mine], kv_indices, block=block)
            assert counts == [tiles.num_tiles]
            all_tiles.append(tiles)
    owners = [torch.empty(0, dtype=torch.int32), *(tiles.owners.view(-1) for tiles in all_tiles)]
    table, counts = merge_table(torch.cat(owners), num_rows)
    fills_up = torch.arange(table.shape[1]) >= counts.clamp(min=1)[:, None]
    bias = torch.where(fills_up, float("-inf"), 0.0) if fills_up.any() else None
    return Plan(all_tiles, table, bias, counts)


def attend(q: Tensor, k_rows: Tensor, v_rows: Tensor, sm_scale: float, **lists: Tensor) -> tuple[Tensor, Tensor]:
    return plan(q.shape[0], **lists).attend(q, k_rows, v_rows, sm_scale)


def check(args: tuple[Tensor, ...], lists: dict[str, Tensor]) -> None:
    """Compare with the definition; a row that attends to nothing has no partials."""
    sm_scale = args[0].shape[1] ** -0.5
    planned = plan(args[0].shape[0], **lists)
    out, lse = planned.attend(*args, sm_scale)
    exact = [x.float() for x in args]
    want_out, want_lse = ragged_attention_reference(*exact, **lists, sm_scale=sm_scale)
    baseline = plain_attention(*args, sm_scale=sm_scale, **lists)
    idle = want_lse.isinf()
    assert torch.equal(planned.counts == 0, idle)
    assert lse.dtype == torch.float32
    seen = ~idle
    assert_accurate("out", out[seen], want_out[seen], baseline[seen], noise=rounding_noise(out.dtype, False))
    assert_accurate("lse", lse[seen], want_lse[seen], want_lse[seen], noise=LSE_NOISE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 100, 600])
def test_one_unit(length: int, dtype: torch.dtype) -> None:
    args = rows(3, 1200, 64, dtype)
    lists = units([[0, 2]], [length], 1200)
    if length:
        check(args, lists)
    else:
        assert plan(3, **lists).table.shape == (3, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_a_row_in_several_units_sees_their_union(head_dim: int, dtype: torch.dtype) -> None:
    """Runs of very uneven length, one of them empty; row 4 only in an empty unit, row 5 in none."""
    args = rows(7, 300, head_dim, dtype)
    lists = units([[0, 1, 2, 3, 6], [2], [1, 0, 6], [4], [], [3, 2, 1]], [100, 1, 63, 0, 20, 7], 300)
    check(args, lists)


@pytest.mark.parametrize(("num_heads", "group"), [(1, 1), (3, 3), (5, 7), (2, 5)])
def test_decode_step_with_shared_prefix(num_heads: int, group: int) -> None:
    """Three requests on one prefix, one unit per KV head; each has a suffix of its own."""
    num_rows = 3 * num_heads * group
    by_head = torch.arange(num_rows).view(3, num_heads, group)
    prefix = [by_head[:, h].flatten().tolist() for h in range(num_heads)]
    suffix = [by_head[r, h].tolist() for r in range(3) for h in range(num_heads)]
    lens = [37 * (h + 1) % 130 for h in range(num_heads)] + [1 + 9 * i % 40 for i in range(len(suffix))]
    args = rows(num_rows, 400, 32, torch.bfloat16)
    check(args, units(prefix + suffix, lens, 400))


def test_units_of_many_rows() -> None:
    args = rows(150, 200, 16, torch.float16)
    lists = units([list(range(150)), list(range(100, 30, -1)), [5]], [70, 100, 3], 200)
    check(args, lists)


@pytest.mark.parametrize(("num_rows", "q_lists", "kv_lens"), [(0, [], []), (4, [], []), (4, [[0], []], [0, 5])])
def test_nothing_to_attend_to(num_rows: int, q_lists: list[list[int]], kv_lens: list[int]) -> None:
    q, k, v = rows(num_rows, 20, 16, torch.bfloat16)
    planned = plan(num_rows, **units(q_lists, kv_lens, 20))
    assert planned.counts.tolist() == [0] * num_rows
    assert planned.table.shape == (num_rows, 0)
    for tiles in planned.tiles:
        assert list(attend_tiles(tiles, q.float(), k, v, 0.25, Scratch())) == []


def test_worked_example() -> None:
    """Weights 1, 2, 4 in one softmax, though two units list the keys; 4 / 7 of row 0's output is key 2's."""
    q = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    k = torch.tensor([[0.0, 9.0], [2.0, 9.0], [4.0, 9.0]]).mul(torch.tensor(2.0).log())
    v = torch.tensor([[7.0, 0.0], [0.0, 7.0], [7.0, 7.0]])
    lists = {"qo_indptr": [0, 2, 3], "qo_indices": [0, 1, 0], "kv_indptr": [0, 2, 3], "kv_indices": [0, 1, 2]}
    index = {name: torch.tensor(x) for name, x in lists.items()}
    out, lse = attend(q, k, v, 0.5, **index)
    torch.testing.assert_close(out, torch.tensor([[5.0, 6.0], [3.5, 3.5]]))
    torch.testing.assert_close(lse, torch.tensor([7.0, 2.0]).log())


def test_tiles_and_scratch_serve_other_rows() -> None:
    lists = units([[0, 1, 2], [2, 3]], [50, 9], 120)
    planned, scratch = plan(4, **lists), Scratch()
    for head_dim in (16, 32, 16):
        args = rows(4, 120, head_dim, torch.float32)
        got = planned.attend(*args, 0.3, scratch)
        want = attend(*args, 0.3, **lists)
        assert_same_bits("out", got[0], want[0])
        assert_same_bits("lse", got[1], want[1])


def test_rows_beyond_32_bit_offsets() -> None:
    """Row times head_dim passes 2**31. A fresh map is virtual memory: only the rows that are read get to exist."""
    num_rows = 2**31 // 64 + 8
    arena = torch.frombuffer(mmap.mmap(-1, num_rows * 128), dtype=torch.float16).view(num_rows, 64)
    arena[-8:] = torch.randn(8, 64)
    q = torch.randn(2, 64).half()
    lists = units([[0, 1]], [8], 16)
    want = attend(q, arena[-8:].clone(), arena[-8:].clone(), 0.125, **lists)
    lists["kv_indices"] += num_rows - 8
    got = attend(q, arena, arena, 0.125, **lists)
    assert_same_bits("out", got[0], want[0])
    assert_same_bits("lse", got[1], want[1])


def test_small_calls_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    args = rows(6, 2000, 64, torch.bfloat16)
    lists = units([[0, 1, 2], [2, 3, 4, 5]], [900, 350], 2000)
    whole = attend(*args, 0.125, **lists)
    monkeypatch.setattr(cpu, "CALL_BYTES", 1)
    parts = attend(*args, 0.125, **lists)
    assert_same_bits("out", parts[0], whole[0])
    assert_same_bits("lse", parts[1], whole[1])


def test_two_calls_give_the_same_bits() -> None:
    args = rows(6, 500, 64, torch.bfloat16)
    lists = units([[0, 1, 2], [2, 3, 4, 5]], [200, 100], 500)
    first, second = (attend(*args, 0.125, **lists) for _ in range(2))
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
