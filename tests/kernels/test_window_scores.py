from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.references import window_scores_reference
from helpers.tolerance import FLOAT32_NOISE, assert_accurate, assert_same_bits
from kvevict_kernels import key_scores
from kvevict_kernels.key_scores import window_scores

pytestmark = pytest.mark.usefixtures("poisoned_empty")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NO_POOLING = {"kernel_size": 1}
POOLINGS: list[dict[str, Any]] = [NO_POOLING] + [
    {"kernel_size": size, "pooling": pooling, "order": order}
    for size, pooling, order in itertools.product((3, 7), ("max", "avg"), ("pool-mean", "mean-pool"))
]
# W, num_qo_heads, num_kv_heads, head_dim, N
SIZES = [
    (1, 3, 3, 16, 1),
    (5, 9, 3, 64, 63),
    (8, 5, 5, 80, 100),
    (11, 14, 7, 32, 100),
    (16, 4, 1, 64, 200),
    (4, 16, 1, 576, 70),
]


def window(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, ahead: int | None = None
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Arguments of a call; the lse covers the range plus some unseen mass. Slots outside the range are NaN.

    Args:
        ahead: tokens from the range's first key to the first query; default: the window is the range's end.
    """
    num_queries, num_qo_heads, num_kv_heads, head_dim, num_keys = sizes
    ahead = max(0, num_keys - num_queries) if ahead is None else ahead
    queries = torch.randn(num_queries, num_qo_heads, head_dim).to(dtype)
    k_buffer = torch.full((2 * num_keys + 1, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    slots = torch.randperm(2 * num_keys + 1)[:num_keys]
    keys = torch.randn(num_keys, num_kv_heads, head_dim).to(dtype)
    k_buffer[slots] = keys
    sm_scale = head_dim**-0.5
    keys = keys.float().repeat_interleave(num_qo_heads // num_kv_heads, 1)
    logits = sm_scale * torch.einsum("whd,nhd->whn", queries.float(), keys)
    seen = torch.arange(num_keys) <= ahead + torch.arange(num_queries)[:, None]
    lse = logits.masked_fill(~seen[:, None], -torch.inf).logsumexp(-1)
    lse += torch.rand(lse.shape)  # keys outside the range hold up to 63 % of the mass
    args = tuple(x.to(device) for x in (queries, lse, k_buffer, slots))
    return args, {"sm_scale": sm_scale, "key_start": 1000, "query_start": 1000 + ahead}


def plain_scores(queries: Tensor, lse: Tensor, k_buffer: Tensor, slots: Tensor, **options: Any) -> Tensor:
    """Baseline for the mean: the product rounded to the dtype of the inputs, as an eager model does it."""
    keys = k_buffer[slots].repeat_interleave(queries.shape[1] // k_buffer.shape[1], 1)
    logits = torch.einsum("whd,nhd->whn", queries, keys).float() * options["sm_scale"]
    p = (logits - lse[..., None]).exp()
    first_key = options["key_start"] - options["query_start"]
    positions = first_key + torch.arange(slots.numel(), device=p.device)
    p = p.masked_fill((positions > torch.arange(len(p), device=p.device)[:, None])[:, None], 0.0)
    return p.unflatten(1, (k_buffer.shape[1], -1)).mean((0, 2))


@pytest.mark.parametrize("pool", POOLINGS, ids=lambda pool: "-".join(map(str, pool.values())))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_reference(device: str, sizes: tuple[int, int, int, int, int], pool: dict[str, Any]) -> None:
    args, options = window(sizes, torch.float16, device)
    pooled, mean = window_scores(*args, **options, **pool)
    want_pooled, want_mean = window_scores_reference(*args, **options, **pool)
    assert_accurate("mean", mean, want_mean, want_mean, noise=4 * FLOAT32_NOISE)
    assert_accurate("pooled", pooled, want_pooled, want_pooled, noise=4 * FLOAT32_NOISE)
    assert pooled.data_ptr() != mean.data_ptr()


@pytest.mark.parametrize("ahead", [0, 3, 70, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_causal_mask(device: str, dtype: torch.dtype, ahead: int) -> None:
    """The window inside, across the end of, and after the range."""
    args, options = window((8, 6, 3, 64, 100), dtype, device, ahead)
    pooled, mean = window_scores(*args, **options, kernel_size=5)
    want_pooled, want_mean = window_scores_reference(*args, **options, kernel_size=5)
    assert_accurate("mean", mean, want_mean, want_mean, noise=4 * FLOAT32_NOISE)
    assert_accurate("pooled", pooled, want_pooled, want_pooled, noise=4 * FLOAT32_NOISE)
    assert_accurate("mean", mean, want_mean, plain_scores(*args, **options), noise=4 * FLOAT32_NOISE)
    assert not mean[:, ahead + 8 :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float8_keys_count_as_the_same_numbers(device: str, dtype: torch.dtype) -> None:
    """Their layer's scale is a factor of the softmax scale."""
    args, options = window((8, 6, 3, 64, 100), dtype, device)
    stored = args[2].to(torch.float8_e4m3fn)
    options["sm_scale"] *= 0.37
    got = window_scores(*args[:2], stored, args[3], **options, kernel_size=5)
    want = window_scores(*args[:2], stored.to(dtype), args[3], **options, kernel_size=5)
    for name, one, other in zip(("pooled", "mean"), got, want, strict=True):
        assert_same_bits(name, one, other)


@pytest.mark.parametrize("num_keys", [121, 122, 123, 128, 129, 250])
@pytest.mark.parametrize("kernel_size", [7, 31, 127])
def test_tile_borders_do_not_show(device: str, kernel_size: int, num_keys: int) -> None:
    args, options = window((2, 2, 2, 16, num_keys), torch.float32, device, ahead=num_keys)
    pooled, mean = window_scores(*args, **options, kernel_size=kernel_size)
    want_pooled, want_mean = window_scores_reference(*args, **options, kernel_size=kernel_size)
    assert_accurate("mean", mean, want_mean, want_mean, noise=4 * FLOAT32_NOISE)
    assert_accurate("pooled", pooled, want_pooled, want_pooled, noise=4 * FLOAT32_NOISE)


def test_chunks_of_the_cpu_path_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    args, options = window((4, 6, 3, 64, 100), torch.bfloat16, "cpu")
    whole = window_scores(*args, **options, kernel_size=7)
    for name, value in (("KEYS_PER_TILE", 17), ("EARLIER_KEYS_PER_TILE", 17), ("WEIGHTS_PER_TILE", 17 * 6 * 2)):
        monkeypatch.setattr(key_scores, name, value)
    parts = window_scores(*args, **options, kernel_size=7)
    assert_accurate("pooled", parts[0], whole[0], whole[0], noise=FLOAT32_NOISE)
    assert_accurate("mean", parts[1], whole[1], whole[1], noise=FLOAT32_NOISE)


def test_rows_are_attention_weights(device: str) -> None:
    """With the lse over exactly the range every query spends all its attention in it."""
    args, options = window((4, 6, 3, 64, 100), torch.float32, device, ahead=100)
    keys = args[2][args[3]].repeat_interleave(2, 1)
    lse = (options["sm_scale"] * torch.einsum("whd,nhd->whn", args[0], keys)).logsumexp(-1)
    _, mean = window_scores(args[0], lse, *args[2:], **options)
    torch.testing.assert_close(mean.sum(1), torch.ones(3, device=device))


def test_worked_pooling_orders(device: str) -> None:
    """Kernel 3, two window rows, two heads: pooling first keeps what averaging first loses."""
    p = torch.tensor(
        [
            [[0.10, 0.40, 0.10, 0.10, 0.10], [0.05, 0.05, 0.05, 0.05, 0.60]],
            [[0.10, 0.10, 0.10, 0.40, 0.10], [0.05, 0.05, 0.05, 0.05, 0.50]],
        ]
    )  # [W, H, N]
    queries = torch.eye(2, 16)[:, None].expand(2, 2, 16).contiguous()  # query w reads column w of a key
    k_buffer = torch.zeros(5, 2, 16)
    k_buffer[..., :2] = p.log().permute(2, 1, 0)
    args = [x.to(device) for x in (queries, torch.zeros(2, 2), k_buffer, torch.arange(5))]
    options: dict[str, Any] = {"sm_scale": 1.0, "key_start": 0, "query_start": 5, "kernel_size": 3}
    first, mean = window_scores(*args, **options)
    last, _ = window_scores(*args, **options, order="mean-pool")
    average, _ = window_scores(*args, **options, pooling="avg")
    close = torch.testing.assert_close
    head_1 = [0.05, 0.05, 0.05, 0.55, 0.55]
    close(first.cpu(), torch.tensor([[0.25, 0.25, 0.40, 0.25, 0.25], head_1]))
    close(last.cpu(), torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.25], head_1]))
    close(mean.cpu(), p.mean(0))
    close(average[0].cpu(), torch.tensor([0.35, 0.45, 0.60, 0.45, 0.35]) / 3)  # padding counts: always a third


def test_empty_range(device: str) -> None:
    args, options = window((4, 6, 3, 16, 1), torch.bfloat16, device)
    pooled, mean = window_scores(*args[:3], args[3][:0], **options, kernel_size=7)
    assert pooled.shape == mean.shape == (3, 0)
    assert pooled.dtype == mean.dtype == torch.float32


def test_two_calls_give_the_same_bits(device: str) -> None:
    args, options = window((11, 14, 7, 32, 300), torch.bfloat16, device)
    first, second = (window_scores(*args, **options, kernel_size=7) for _ in range(2))
    assert_same_bits("pooled", first[0], second[0])
    assert_same_bits("mean", first[1], second[1])


Q, LSE, KEYS, SLOTS = torch.zeros(4, 6, 8), torch.zeros(4, 6), torch.zeros(9, 3, 8), torch.arange(5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": Q[0]}, r"queries: expected shape \[any, any, any\], got \[6, 8\]"),
        ({"queries": Q[:0], "lse": LSE[:0]}, "queries: expected at least one query, got W = 0"),
        (
            {"queries": Q[:, :5].contiguous(), "lse": LSE[:, :5].contiguous()},
            "queries: .*multiple of 3 KV heads",
        ),
        ({"queries": Q.int()}, "queries: expected dtype bfloat16 or float16 or float32, got int32"),
        ({"lse": LSE.half()}, "lse: expected dtype float32"),
        ({"lse": LSE[:3]}, r"lse: expected shape \[4, 6\], got \[3, 6\]"),
        ({"k_buffer": KEYS.half()}, "k_buffer: expected dtype float32 or float8_e4m3fn, got float16"),
        ({"k_buffer": KEYS[..., :4]}, r"k_buffer: expected shape \[any, any, 8\]"),
        ({"k_buffer": KEYS.transpose(0, 1)}, "k_buffer: expected a contiguous tensor"),
        ({"token_slots": SLOTS.int()}, "token_slots: expected dtype int64"),
        ({"token_slots": SLOTS + 5}, r"token_slots: expected indices in \[0, 9\), got 5 to 9"),
        ({"sm_scale": 0.0}, "sm_scale: expected a finite number > 0"),
        ({"sm_scale": float("nan")}, "sm_scale: expected a finite number > 0"),
        ({"key_start": -1}, "key_start: expected an int >= 0"),
        ({"query_start": 1.5}, "query_start: expected an int >= 0"),
        ({"kernel_size": 0}, "kernel_size: expected an int >= 1"),
        ({"kernel_size": 129}, "kernel_size: expected an int >= 1 and <= 127, got 129"),
        ({"kernel_size": 4}, "kernel_size: expected an odd number, got 4"),
        ({"pooling": "min"}, "pooling: expected one of max, avg, got 'min'"),
        ({"order": "pool"}, "order: expected one of pool-mean, mean-pool, got 'pool'"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"queries": Q, "lse": LSE, "k_buffer": KEYS, "token_slots": SLOTS}
    call |= {"sm_scale": 1.0, "key_start": 0, "query_start": 5, **change}
    with pytest.raises(ValueError, match=message):
        window_scores(**call)
