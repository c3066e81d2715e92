"""Scores of keys: by the last queries of a prompt, pooled, and summed over all queries that see them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.references import accumulated_attention_reference, attention_reference, window_scores_reference
from helpers.tolerance import FLOAT32_NOISE, assert_accurate, assert_same_bits
from kvevict_kernels import key_scores
from kvevict_kernels.key_scores import accumulated_attention, window_scores

pytestmark = pytest.mark.usefixtures("poisoned_empty")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
START = 1000
NOISE = 4 * FLOAT32_NOISE
# n, num_qo_heads, num_kv_heads, head_dim, N
SIZES = [
    (1, 3, 3, 16, 1),
    (5, 9, 3, 64, 63),
    (63, 9, 3, 64, 63),
    (100, 5, 5, 80, 100),
    (70, 14, 7, 32, 100),
    (100, 4, 1, 64, 30),
    (20, 6, 3, 8, 300),
    (9, 16, 1, 576, 40),
]
WINDOWS = [
    (1, 3, 3, 16, 1),
    (5, 9, 3, 64, 63),
    (8, 5, 5, 80, 100),
    (11, 14, 7, 32, 100),
    (16, 4, 1, 64, 200),
    (4, 16, 1, 576, 70),
]
NO_POOLING = {"kernel_size": 1}
POOLINGS: list[dict[str, Any]] = [NO_POOLING] + [
    {"kernel_size": size, "pooling": pooling, "order": order}
    for size, pooling, order in itertools.product((3, 7), ("max", "avg"), ("pool-mean", "mean-pool"))
]


def prompt(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, ahead: int = 0, spread: float = 1.0
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Arguments of a call; the lse covers the keys plus some unseen mass. Slots of no key are NaN.

    Args:
        sizes: n, num_qo_heads, num_kv_heads, head_dim, N.
        dtype: of queries and keys.
        device: of all tensors.
        ahead: tokens from the first key to the first query; negative: keys begin after the first query.
        spread: standard deviation of the scaled scores.
    """
    num_queries, num_qo_heads, num_kv_heads, head_dim, num_keys = sizes
    queries = (spread * torch.randn(num_queries, num_qo_heads, head_dim)).to(dtype)
    k_buffer = torch.full((2 * num_keys + 1, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    slots = torch.randperm(2 * num_keys + 1)[:num_keys]
    keys = torch.randn(num_keys, num_kv_heads, head_dim).to(dtype)
    k_buffer[slots] = keys
    sm_scale = head_dim**-0.5
    lse = logits(queries, keys, sm_scale, ahead).logsumexp(-1)
    lse = torch.logaddexp(lse, torch.zeros(())) + torch.rand(lse.shape)  # keys outside hold part of the mass
    args = tuple(x.to(device) for x in (queries, lse, k_buffer, slots))
    return args, {"sm_scale": sm_scale, "key_start": START, "query_start": START + ahead}


def logits(queries: Tensor, keys: Tensor, sm_scale: float, ahead: int) -> Tensor:
    """Scaled scores [n, num_qo_heads, N], float32, -inf where the query does not see the key."""
    keys = keys.float().repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    scores = sm_scale * torch.einsum("ihd,jhd->ihj", queries.float(), keys)
    key_positions = torch.arange(len(keys), device=scores.device)
    query_positions = ahead + torch.arange(len(queries), device=scores.device)
    return scores.masked_fill((key_positions > query_positions[:, None])[:, None], -torch.inf)


def plain_sums(queries: Tensor, lse: Tensor, k_buffer: Tensor, slots: Tensor, **options: Any) -> Tensor:
    """Baseline: the exponents rounded to the dtype of the inputs, everything else in float32."""
    exponents = attention_reference(queries, lse, k_buffer[slots], **options).log().to(queries.dtype)
    return exponents.float().exp().mean(2).sum(0)


def window(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, ahead: int | None = None
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Arguments of a call; ``ahead`` as above, by default the window is the range's end."""
    return prompt(sizes, dtype, device, max(0, sizes[4] - sizes[0]) if ahead is None else ahead)


def check_window(
    args: tuple[Tensor, ...], options: dict[str, Any], baseline: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compare pooled and mean scores with the reference; ``baseline`` of the mean."""
    pooled, mean = window_scores(*args, **options)
    want_pooled, want_mean = window_scores_reference(*args, **options)
    assert_accurate("mean", mean, want_mean, want_mean if baseline is None else baseline, noise=NOISE)
    assert_accurate("pooled", pooled, want_pooled, want_pooled, noise=NOISE)
    return pooled, mean


# ---- by the last queries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", POOLINGS, ids=lambda pool: "-".join(map(str, pool.values())))
@pytest.mark.parametrize("sizes", WINDOWS, ids=str)
def test_window_scores_match_the_reference(device, sizes, pool):
    args, options = window(sizes, torch.float16, device)
    pooled, mean = check_window(args, options | pool)
    assert pooled.data_ptr() != mean.data_ptr()


@pytest.mark.parametrize("ahead", [0, 3, 70, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_causal_mask_of_a_window(device, dtype, ahead):
    """The window inside, across the end of, and after the range."""
    args, options = window((8, 6, 3, 64, 100), dtype, device, ahead)
    _, mean = check_window(args, options | {"kernel_size": 5}, plain_sums(*args, **options) / 8)
    assert not mean[:, ahead + 8 :].any()


@pytest.mark.parametrize("num_keys", [121, 122, 123, 128, 129, 250])
@pytest.mark.parametrize("kernel_size", [7, 31, 127])
def test_tile_borders_do_not_show(device, kernel_size, num_keys):
    args, options = window((2, 2, 2, 16, num_keys), torch.float32, device, ahead=num_keys)
    check_window(args, options | {"kernel_size": kernel_size})


def test_chunks_of_the_cpu_path_do_not_show(monkeypatch):
    args, options = window((4, 6, 3, 64, 100), torch.bfloat16, "cpu")
    whole = window_scores(*args, **options, kernel_size=7)
    for name, value in (("KEYS_PER_TILE", 17), ("EARLIER_KEYS_PER_TILE", 17), ("WEIGHTS_PER_TILE", 17 * 6 * 2)):
        monkeypatch.setattr(key_scores, name, value)
    parts = window_scores(*args, **options, kernel_size=7)
    assert_accurate("pooled", parts[0], whole[0], whole[0], noise=FLOAT32_NOISE)
    assert_accurate("mean", parts[1], whole[1], whole[1], noise=FLOAT32_NOISE)


def test_worked_example_of_pooling_orders(device):
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


# ---- summed over queries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("ahead", [-3, 0, 70, 500])
@pytest.mark.parametrize(("reduction", "dtype"), [("sum", torch.float16), ("squares", torch.bfloat16)], ids=str)
def test_sums_match_the_reference(device, sizes, ahead, reduction, dtype):
    args, options = prompt(sizes, dtype, device, ahead)
    got = accumulated_attention(*args, **options, reduction=reduction)
    want = accumulated_attention_reference(*args, **options, reduction=reduction)
    assert got.dtype == torch.float32
    assert_accurate(reduction, got, want, want, noise=NOISE)
    assert not got[:, max(0, ahead + sizes[0]) :].any()


@pytest.mark.parametrize("ahead", [-70, -3, 0, 3, 70, 100, 500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_causal_mask(device, dtype, ahead):
    """Queries that begin before, inside and after the keys."""
    args, options = prompt((100, 6, 3, 64, 100), dtype, device, ahead)
    got = accumulated_attention(*args, **options)
    want = accumulated_attention_reference(*args, **options)
    assert_accurate("sums", got, want, plain_sums(*args, **options), noise=NOISE)
    assert not got[:, max(0, ahead + 100) :].any()


@pytest.mark.parametrize("ahead", [-150, -1, 0, 1, 129])
@pytest.mark.parametrize("tiles", [(17, 2000), (64, 2**14), (128, 2**30)], ids=str)
def test_tiles_of_the_cpu_path_do_not_show(tiles, ahead, monkeypatch):
    args, options = prompt((300, 6, 3, 16, 257), torch.float32, "cpu", ahead)
    want = accumulated_attention_reference(*args, **options)
    monkeypatch.setattr(key_scores, "KEYS_PER_TILE", tiles[0])
    monkeypatch.setattr(key_scores, "EARLIER_KEYS_PER_TILE", tiles[0])
    monkeypatch.setattr(key_scores, "WEIGHTS_PER_TILE", tiles[1])
    got = accumulated_attention(*args, **options)
    assert_accurate("sums", got, want, want, noise=NOISE)


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0, 15.0])
def test_large_scores_cost_no_accuracy(device, spread):
    """Rounding a score of 60 to bfloat16 would change its weight by up to 13 %."""
    args, options = prompt((400, 3, 1, 64, 400), torch.bfloat16, device, spread=spread)
    want = accumulated_attention_reference(*args, **options)
    error = accumulated_attention(*args, **options) - want
    assert float(error.norm() / want.norm()) < 1e-3


def test_product_of_processors_that_cannot_multiply_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    args, options = prompt((100, 6, 3, 64, 100), torch.bfloat16, "cpu", ahead=3)
    want = accumulated_attention_reference(*args, **options)
    assert_accurate("sums", accumulated_attention(*args, **options), want, want, noise=NOISE)


def test_worked_example(device):
    """Two queries of two heads on three keys; the last key comes after the first query."""
    p = torch.tensor([[[0.5, 0.5, 0.25], [0.25, 0.75, 0.5]], [[0.25, 0.5, 0.25], [0.125, 0.125, 0.75]]])
    queries = torch.eye(4, 16).view(2, 2, 16)  # query i of head h reads column 2 * i + h of a key
    k_buffer = torch.zeros(3, 1, 16)
    k_buffer[:, 0, :4] = p.view(4, 3).log().T
    args = [x.to(device) for x in (queries, torch.zeros(2, 2), k_buffer, torch.arange(3))]
    found = accumulated_attention(*args, sm_scale=1.0, key_start=7, query_start=8)
    want = torch.tensor([[0.375 + 0.1875, 0.625 + 0.3125, 0.0 + 0.5]])
    torch.testing.assert_close(found.cpu(), want)
    squares = accumulated_attention(*args, sm_scale=1.0, key_start=7, query_start=8, reduction="squares")
    want = torch.tensor([[0.25 + 0.0625 + 0.0625 + 0.015625, 0.25 + 0.5625 + 0.25 + 0.015625, 0.0625 + 0.5625]])
    torch.testing.assert_close(squares.cpu(), want)


# ---- both --------------------------------------------------------------------------------------------------------

Score = Callable[..., tuple[Tensor, ...]]


def sums(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    """Sums of attention and of its squares."""
    return tuple(accumulated_attention(*args, **options, reduction=one) for one in ("sum", "squares"))


def pooled(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    """Pooled and mean scores."""
    return window_scores(*args, **options, kernel_size=7)


BOTH = pytest.mark.parametrize("score", [pooled, sums])


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float8_keys_count_as_the_same_numbers(device, score, dtype):
    """Their layer's scale is a factor of the softmax scale."""
    args, options = prompt((70, 6, 3, 64, 100), dtype, device, ahead=40)
    stored = args[2].to(torch.float8_e4m3fn)
    options["sm_scale"] *= 0.37
    got, want = (score(*args[:2], keys, args[3], **options) for keys in (stored, stored.to(dtype)))
    for one, other in zip(got, want, strict=True):
        assert_same_bits("scores", one, other)


@BOTH
@pytest.mark.parametrize(("computed", "stored"), list(itertools.permutations(DTYPES, 2)), ids=str)
def test_keys_of_another_dtype_than_the_queries_count_as_the_same_numbers(device, interpreted, score, computed, stored):
    """A pool of 16 bits beside a model in float32. Kernels for a GPU round its queries, as their attention does."""
    args, options = prompt((70, 6, 3, 64, 100), computed, device, ahead=40)
    queries, lse, keys, slots = args
    keys = keys.to(stored)
    is_compiled = interpreted or device == "cuda"
    same = (queries.to(stored), lse, keys, slots) if is_compiled else (queries, lse, keys.to(computed), slots)
    for one, other in zip(score(queries, lse, keys, slots, **options), score(*same, **options), strict=True):
        assert_same_bits("scores", one, other)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_calls_give_the_same_bits(device, score, dtype):
    args, options = prompt((100, 14, 7, 32, 300), dtype, device, ahead=200)
    for one, other in zip(score(*args, **options), score(*args, **options), strict=True):
        assert_same_bits("scores", one, other)


@BOTH
@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_score(device, score, num_queries, num_keys):
    args, options = prompt((5, 6, 3, 16, 5), torch.bfloat16, device)
    given = args[0][:num_queries], args[1][:num_queries], args[2], args[3][:num_keys]
    if score is pooled and not num_queries:
        with pytest.raises(ValueError, match="queries: expected at least one query, got W = 0"):
            score(*given, **options)
        return
    for found in score(*given, **options):
        assert_same_bits("scores", found, torch.zeros(3, num_keys))


Q, LSE, KEYS, SLOTS = torch.zeros(4, 6, 8), torch.zeros(4, 6), torch.zeros(9, 3, 8), torch.arange(5)
OF_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"queries": Q[0]}, r"queries: expected shape \[any, any, any\], got \[6, 8\]"),
    ({"queries": Q[:, :5].contiguous(), "lse": LSE[:, :5].contiguous()}, "queries: .*multiple of 3 KV heads"),
    ({"queries": Q.int()}, "queries: expected dtype bfloat16 or float16 or float32, got int32"),
    ({"lse": LSE.half()}, "lse: expected dtype float32"),
    ({"lse": LSE[:3]}, r"lse: expected shape \[4, 6\], got \[3, 6\]"),
    ({"k_buffer": KEYS.int()}, "k_buffer: expected dtype bfloat16 or float16 or float32 or float8_e4m3fn, got int32"),
    ({"k_buffer": KEYS[..., :4]}, r"k_buffer: expected shape \[any, any, 8\]"),
    ({"k_buffer": KEYS.transpose(0, 1)}, "k_buffer: expected a contiguous tensor"),
    ({"token_slots": SLOTS.int()}, "token_slots: expected dtype int64"),
    ({"token_slots": SLOTS + 5}, r"token_slots: expected indices in \[0, 9\), got 5 to 9"),
    ({"sm_scale": 0.0}, "sm_scale: expected a finite number > 0"),
    ({"sm_scale": float("nan")}, "sm_scale: expected a finite number > 0"),
    ({"key_start": -1}, "key_start: expected an int >= 0"),
    ({"query_start": 1.5}, "query_start: expected an int >= 0"),
]
OF_WINDOWS = [
    ({"kernel_size": 0}, "kernel_size: expected an int >= 1"),
    ({"kernel_size": 129}, "kernel_size: expected an int >= 1 and <= 127, got 129"),
    ({"kernel_size": 4}, "kernel_size: expected an odd number, got 4"),
    ({"pooling": "min"}, "pooling: expected one of max, avg, got 'min'"),
    ({"order": "pool"}, "order: expected one of pool-mean, mean-pool, got 'pool'"),
]
OF_SUMS = [({"reduction": "mean"}, "reduction: expected one of sum, squares, got 'mean'")]


@pytest.mark.parametrize(
    ("score", "change", "message"),
    [(window_scores, *case) for case in OF_BOTH + OF_WINDOWS]
    + [(accumulated_attention, *case) for case in OF_BOTH + OF_SUMS],
)
def test_bad_arguments_are_named(score, change, message):
    call: dict[str, Any] = {"queries": Q, "lse": LSE, "k_buffer": KEYS, "token_slots": SLOTS}
    with pytest.raises(ValueError, match=message):
        score(**call | {"sm_scale": 1.0, "key_start": 0, "query_start": 5, **change})
