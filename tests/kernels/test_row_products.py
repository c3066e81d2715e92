"""Stored rows: products and norms are theirs, rotated back, whichever code multiplies; torch gathers them as views."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.statistics import normal
from kvevict_kernels import stored_rows as op
from kvevict_kernels.checks import FP8
from kvevict_kernels.numba_products import call
from kvevict_kernels.rotary import Rotary
from kvevict_kernels.span_attention import prepare_on_cpu
from kvevict_kernels.stored_rows import WORD, as_words

LAYERS, SLOTS, HEADS, DIM = 3, 40, 2, 32


def given(dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """An arena, slots in no order, and weights."""
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))[:count]
    return normal(0, LAYERS, SLOTS, HEADS, DIM).to(dtype), slots, normal(1, LAYERS, HEADS, DIM)


@pytest.fixture(params=["compiled", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which code multiplies; torch's takes blocks of one layer and two tokens."""
    if request.param == "torch":
        monkeypatch.setattr(op, "reason_not_to_run", lambda head_dim: "not installed")
        monkeypatch.setitem(op._BLOCK_ELEMENTS, "cpu", 2 * HEADS * DIM)
    elif op.reason_not_to_run(DIM) is not None:
        pytest.skip("this machine cannot run compiled code")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 17, SLOTS])
@pytest.mark.parametrize("is_neox", [True, False, None])
def test_products_and_norms(dtype: torch.dtype, count: int, is_neox: bool | None) -> None:
    arena, slots, weights = given(dtype, count)
    rows, turn = arena[:, slots].float(), None
    expected_norms = rows.norm(dim=-1)
    if is_neox is not None:
        angles = torch.outer(torch.arange(300.0), torch.logspace(0, -2, DIM // 4))
        rotary = Rotary(torch.cat([angles.cos(), angles.sin()], dim=-1), is_neox, start=4)
        positions = torch.arange(200, 200 + count)
        turn = rotary.turn_of(positions, DIM)
        rows = torch.stack([rotary.apply(layer, positions, inverse=True) for layer in rows])
    products, norms = op.row_products(arena, slots, weights, turn)
    torch.testing.assert_close(norms, expected_norms)
    expected = torch.einsum("lnhd,lhd->lnh", rows.double(), weights.double())
    torch.testing.assert_close(products.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("path")
def test_heads_before_tokens() -> None:
    arena, slots, weights = given(torch.bfloat16, 9)
    other = arena.transpose(1, 2).contiguous().transpose(1, 2)
    for got, expected in zip(
        op.row_products(other, slots, weights), op.row_products(arena, slots, weights), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.usefixtures("path")
def test_values_that_are_the_first_columns_of_keys() -> None:
    arena, slots, _ = given(torch.bfloat16, 9)
    weights = normal(3, LAYERS, HEADS, 16)
    products, norms = op.row_products(arena[..., :16], slots, weights)
    rows = arena[:, slots, :, :16].float()
    torch.testing.assert_close(norms, rows.norm(dim=-1))
    torch.testing.assert_close(products, torch.einsum("lnhd,lhd->lnh", rows, weights))


def test_each_layer_of_float8_has_its_own_scale() -> None:
    arena, slots, weights = given(torch.float32, 9)
    stored, scales = arena.to(torch.float8_e4m3fn), (0.5, 3.0, 0.7)
    meant = stored.float() * torch.tensor(scales).view(-1, 1, 1, 1)
    for got, expected in zip(
        op.row_products(stored, slots, weights, scales=scales), op.row_products(meant, slots, weights), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_what_a_cpu_runs_is_compiled_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call.cache_clear()
    prepare_on_cpu("numba_products", DIM)
    monkeypatch.setattr("kvevict_kernels.numba_products.compiled", lambda *_: 1 / 0)
    op.row_products(*given(torch.bfloat16, 3))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arena": torch.zeros(LAYERS, SLOTS, HEADS, DIM, dtype=torch.int32)}, "arena: expected"),
        ({"arena": torch.zeros(LAYERS, SLOTS, DIM, HEADS).transpose(2, 3)}, "arena: expected"),
        ({"token_slots": torch.tensor([0, SLOTS])}, "token_slots: "),
        ({"token_slots": torch.tensor([-1])}, "token_slots: "),
        ({"weights": torch.zeros(LAYERS, HEADS, DIM + 1)}, "weights: expected"),
        ({"weights": torch.zeros(LAYERS, HEADS, DIM, dtype=torch.float16)}, "weights: expected"),
    ],
)
def test_wrong_arguments_are_named(changed: dict[str, Tensor], message: str) -> None:
    arguments = dict(zip(("arena", "token_slots", "weights"), given(torch.float32, 4), strict=True))
    with pytest.raises(ValueError, match=message):
        op.row_products(**(arguments | changed))


def test_a_rotation_of_other_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"turn\.cos: expected"):
        op.row_products(*given(torch.float32, 5), op.Turn.none(DIM, torch.device("cpu"), num_tokens=3))


ALL_BITS = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(-1, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8, torch.float32], ids=str)
def test_rows_are_gathered_bit_for_bit(dtype: torch.dtype) -> None:
    """Every pattern of 16 bits, payloads of NaN too; by one index for all and by one along the second dimension."""
    rows = ALL_BITS.view(dtype)
    words = as_words(rows)
    assert words.dtype == WORD
    order = torch.randperm(len(rows))
    want = ALL_BITS[order]
    assert torch.equal(torch.index_select(words, 0, order).view(dtype).view(torch.int16), want)
    both = as_words(torch.stack([rows.view(torch.int16)] * 2).view(dtype))
    assert torch.equal(both[:, order].view(dtype).view(torch.int16), torch.stack([want] * 2))


def test_rows_that_do_not_fit_are_left_as_they_are() -> None:
    """A width, a beginning or a step that is no multiple of 16 bytes; rows without columns; fp8 as bytes."""
    rows = torch.zeros(6, 32, dtype=torch.bfloat16)
    assert as_words(rows[:, :16]).dtype == WORD
    for part in (rows[:, :12], rows[:, 4:20], torch.zeros(6, 20, dtype=torch.bfloat16)[:, :16], rows[:, :0], rows.T):
        assert as_words(part).dtype == torch.bfloat16
    assert as_words(torch.zeros(3, 20).to(FP8)).dtype == torch.uint8
