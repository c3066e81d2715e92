from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.references import accumulated_attention_reference
from helpers.tolerance import FLOAT32_NOISE, assert_accurate, assert_same_bits
from kvevict_kernels import key_scores
from kvevict_kernels.key_scores import accumulated_attention

pytestmark = pytest.mark.usefixtures("poisoned_empty")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
START = 1000
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
    ahead = options["query_start"] - options["key_start"]
    keys = k_buffer[slots]
    exponents = logits(queries, keys, options["sm_scale"], ahead) - lse[..., None]
    p = exponents.to(queries.dtype).float().exp()
    return p.unflatten(1, (keys.shape[1], -1)).mean(2).sum(0)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_reference(device: str, sizes: tuple[int, int, int, int, int]) -> None:
    args, options = prompt(sizes, torch.float16, device)
    got = accumulated_attention(*args, **options)
    want = accumulated_attention_reference(*args, **options)
    assert got.dtype == torch.float32
    assert_accurate("sums", got, want, want, noise=4 * FLOAT32_NOISE)
    assert not got[:, sizes[0] :].any()


@pytest.mark.parametrize("ahead", [-70, -3, 0, 3, 70, 100, 500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_causal_mask(device: str, dtype: torch.dtype, ahead: int) -> None:
    """Queries that begin before, inside and after the keys."""
    args, options = prompt((100, 6, 3, 64, 100), dtype, device, ahead)
    got = accumulated_attention(*args, **options)
    want = accumulated_attention_reference(*args, **options)
    assert_accurate("sums", got, want, plain_sums(*args, **options), noise=4 * FLOAT32_NOISE)
    assert not got[:, max(0, ahead + 100) :].any()


@pytest.mark.parametrize("reduction", ["sum", "squares"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float8_keys_count_as_the_same_numbers(device: str, dtype: torch.dtype, reduction: str) -> None:
    """Their layer's scale is a factor of the softmax scale."""
    args, options = prompt((70, 6, 3, 64, 100), dtype, device, ahead=40)
    stored = args[2].to(torch.float8_e4m3fn)
    options |= {"sm_scale": options["sm_scale"] * 0.37, "reduction": reduction}
    got = accumulated_attention(*args[:2], stored, args[3], **options)
    assert_same_bits(reduction, got, accumulated_attention(*args[:2], stored.to(dtype), args[3], **options))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("ahead", [-3, 0, 70, 500])
def test_squares(device: str, sizes: tuple[int, int, int, int, int], ahead: int) -> None:
    args, options = prompt(sizes, torch.bfloat16, device, ahead)
    got = accumulated_attention(*args, **options, reduction="squares")
    want = accumulated_attention_reference(*args, **options, reduction="squares")
    assert_accurate("squares", got, want, want, noise=4 * FLOAT32_NOISE)
    assert not got[:, max(0, ahead + sizes[0]) :].any()


def test_an_unknown_reduction_is_named() -> None:
    args, options = prompt(SIZES[0], torch.float32, "cpu")
    with pytest.raises(ValueError, match="reduction: expected one of sum, squares, got 'mean'"):
        accumulated_attention(*args, **options, reduction="mean")


@pytest.mark.parametrize("ahead", [-150, -1, 0, 1, 129])
@pytest.mark.parametrize("tiles", [(17, 2000), (64, 2**14), (128, 2**30)], ids=str)
def test_tiles_of_the_cpu_path_do_not_show(tiles: tuple[int, int], ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args, options = prompt((300, 6, 3, 16, 257), torch.float32, "cpu", ahead)
    p = (logits(args[0], args[2][args[3]], options["sm_scale"], ahead) - args[1][..., None]).exp()
    want = p.unflatten(1, (3, 2)).mean(2).sum(0)
    monkeypatch.setattr(key_scores, "KEYS_PER_TILE", tiles[0])
    monkeypatch.setattr(key_scores, "EARLIER_KEYS_PER_TILE", tiles[0])
    monkeypatch.setattr(key_scores, "WEIGHTS_PER_TILE", tiles[1])
    got = accumulated_attention(*args, **options)
    assert_accurate("sums", got, want, want, noise=4 * FLOAT32_NOISE)


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0, 15.0])
def test_large_scores_cost_no_accuracy(device: str, spread: float) -> None:
    """Rounding a score of 60 to bfloat16 would change its weight by up to 13 %."""
    args, options = prompt((400, 3, 1, 64, 400), torch.bfloat16, device, spread=spread)
    p = (logits(args[0], args[2][args[3]], options["sm_scale"], 0) - args[1][..., None]).exp()
    want = p.sum(0).mean(0, keepdim=True)
    error = accumulated_attention(*args, **options) - want
    assert float(error.norm() / want.norm()) < 1e-3


def test_product_of_processors_that_cannot_multiply_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    args, options = prompt((100, 6, 3, 64, 100), torch.bfloat16, "cpu", ahead=3)
    want = accumulated_attention_reference(*args, **options)
    assert_accurate("sums", accumulated_attention(*args, **options), want, want, noise=4 * FLOAT32_NOISE)


@pytest.mark.parametrize("cut", [1, 40, 99])
def test_chunks_of_a_prompt_add_up(device: str, cut: int) -> None:
    """Each chunk of queries with the keys up to its end, as a chunked prefill calls."""
    args, options = prompt((100, 6, 3, 64, 100), torch.float32, device)
    queries, lse, k_buffer, slots = args
    whole = accumulated_attention(*args, **options)
    last = options | {"query_start": START + cut}
    parts = accumulated_attention(queries[cut:], lse[cut:], k_buffer, slots, **last)
    parts[:, :cut] += accumulated_attention(queries[:cut], lse[:cut], k_buffer, slots[:cut], **options)
    assert_accurate("sums", parts, whole, whole, noise=4 * FLOAT32_NOISE)


def test_ranges_of_keys_stand_side_by_side(device: str) -> None:
    args, options = prompt((100, 6, 3, 64, 100), torch.float32, device)
    whole = accumulated_attention(*args, **options)
    first = accumulated_attention(*args[:3], args[3][:37], **options)
    second = accumulated_attention(*args[:3], args[3][37:], **options | {"key_start": START + 37})
    assert_accurate("sums", torch.cat([first, second], 1), whole, whole, noise=4 * FLOAT32_NOISE)


def test_every_query_spends_all_its_attention(device: str) -> None:
    """With the lse over exactly these keys, a head's sums add up to the number of queries."""
    args, options = prompt((100, 6, 3, 64, 100), torch.float32, device)
    lse = logits(args[0], args[2][args[3]], options["sm_scale"], 0).logsumexp(-1)
    sums = accumulated_attention(args[0], lse, *args[2:], **options)
    torch.testing.assert_close(sums.sum(1), torch.full((3,), 100.0, device=device))


def test_worked_example(device: str) -> None:
    """Two queries of two heads on three keys; the last key comes after the first query."""
    p = torch.tensor([[[0.5, 0.5, 0.25], [0.25, 0.75, 0.5]], [[0.25, 0.5, 0.25], [0.125, 0.125, 0.75]]])
    queries = torch.eye(4, 16).view(2, 2, 16)  # query i of head h reads column 2 * i + h of a key
    k_buffer = torch.zeros(3, 1, 16)
    k_buffer[:, 0, :4] = p.view(4, 3).log().T
    args = [x.to(device) for x in (queries, torch.zeros(2, 2), k_buffer, torch.arange(3))]
    sums = accumulated_attention(*args, sm_scale=1.0, key_start=7, query_start=8)
    want = torch.tensor([[0.375 + 0.1875, 0.625 + 0.3125, 0.0 + 0.5]])
    torch.testing.assert_close(sums.cpu(), want)
    squares = accumulated_attention(*args, sm_scale=1.0, key_start=7, query_start=8, reduction="squares")
    want = torch.tensor([[0.25 + 0.0625 + 0.0625 + 0.015625, 0.25 + 0.5625 + 0.25 + 0.015625, 0.0625 + 0.5625]])
    torch.testing.assert_close(squares.cpu(), want)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_sum(device: str, num_queries: int, num_keys: int) -> None:
    args, options = prompt((5, 6, 3, 16, 5), torch.bfloat16, device)
    queries, lse, k_buffer, slots = args
    sums = accumulated_attention(queries[:num_queries], lse[:num_queries], k_buffer, slots[:num_keys], **options)
    assert_same_bits("sums", sums, torch.zeros(3, num_keys))


def test_keys_after_the_last_query_get_nothing(device: str) -> None:
    args, options = prompt((5, 6, 3, 16, 5), torch.bfloat16, device)
    sums = accumulated_attention(*args, **options | {"key_start": START + 5})
    assert_same_bits("sums", sums, torch.zeros(3, 5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_calls_give_the_same_bits(device: str, dtype: torch.dtype) -> None:
    args, options = prompt((100, 14, 7, 32, 300), dtype, device, ahead=200)
    first, second = (accumulated_attention(*args, **options) for _ in range(2))
    assert_same_bits("sums", first, second)


Q, LSE, KEYS, SLOTS = torch.zeros(4, 6, 8), torch.zeros(4, 6), torch.zeros(9, 3, 8), torch.arange(5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": Q[0]}, r"queries: expected shape \[any, any, any\], got \[6, 8\]"),
        ({"queries": Q[:, :5].contiguous(), "lse": LSE[:, :5].contiguous()}, "queries: .*multiple of 3 KV heads"),
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
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"queries": Q, "lse": LSE, "k_buffer": KEYS, "token_slots": SLOTS}
    call |= {"sm_scale": 1.0, "key_start": 0, "query_start": 5, **change}
    with pytest.raises(ValueError, match=message):
        accumulated_attention(**call)
