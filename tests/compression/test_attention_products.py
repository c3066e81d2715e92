"""What passes leave behind for a fit, beside its definition; and a fit of a segment from a pass to the arena."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.fitted import biases_of, rows_of
from sgl_kvevict.compression import Compressor, warm_up
from sgl_kvevict.compression.fits import QUERY_STEP, WEIGHTS_PER_TILE, AttentionProducts
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.attention_matcher import AttentionMatcher
from sgl_kvevict.policies.by_name import configured_policy
from sgl_kvevict.prefix import SegmentPacker, Span

GEOMETRY = KVGeometry(num_layers=2, num_qo_heads=6, num_kv_heads=3, head_dim=16, num_token_slots=300)
NUM_TOKENS, TAIL = 150, 7
SLOTS = torch.randperm(299, generator=torch.Generator().manual_seed(0))[: NUM_TOKENS + TAIL] + 1
SCALE = 0.3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(8)


def make_store(*, has_biases: bool = True) -> SegmentPacker:
    shape = (GEOMETRY.num_layers, GEOMETRY.num_token_slots, GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
    return SegmentPacker(
        GEOMETRY, torch.randn(shape), torch.randn(shape), torch.zeros(shape[:3]) if has_biases else None
    )


def attention(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [num_qo_heads, n, num_keys] of keys, beside something else, and the log-sum-exp [n, num_qo_heads]."""
    scores = torch.einsum("nhd,khd->hnk", queries, keys.repeat_interleave(2, 1)) * SCALE
    lse = scores.logsumexp(2) + 0.2
    return (scores - lse[..., None]).exp(), lse.T.contiguous()


def expected(weights: Tensor, block: int) -> Tensor:
    """Token by token, of every QUERY_STEP-th query."""
    num_tokens = weights.shape[2]
    num_blocks = -(-num_tokens // block)
    sums = torch.zeros(3, num_blocks, block, block)
    for i in range(num_tokens):
        for j in range(i // block * block, min((i // block + 1) * block, num_tokens)):
            paid = (weights[:, ::QUERY_STEP, i] * weights[:, ::QUERY_STEP, j]).sum(1).view(3, 2).sum(1)
            sums[:, i // block, i % block, j % block] = paid
    return sums


@pytest.mark.parametrize("block", [16, 30, 157])
@pytest.mark.parametrize("per_tile", [1, 5000, 2**20])
def test_products_are_summed_over_queries_and_parts(block: int, per_tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of any size; passes in two parts; a last block that is short."""
    monkeypatch.setitem(WEIGHTS_PER_TILE, "cpu", per_tile)
    store = make_store()
    products = AttentionProducts(GEOMETRY, 0, len(SLOTS), block, 4)
    want = torch.zeros(())
    for count in (9, 4):
        queries = torch.randn(count, 6, 16)
        weights, lse = attention(queries, store.k_arena[1, SLOTS])
        products.add(1, queries, lse, store.k_arena[1], SLOTS, SCALE)
        want = want + expected(weights, block)
    torch.testing.assert_close(products.take(1), want, rtol=1e-4, atol=1e-6)
    assert products.take(1) is None and products.take(0) is None


def test_memory_is_known_before_anything_is_seen() -> None:
    """Products, and the values that are copied when the range is compressed."""
    products = AttentionProducts(GEOMETRY, 0, 100, 64, 2)
    assert products.num_bytes == 6 * (2 * 64 * 64 * 4 + 100 * 16 * 2)


@pytest.mark.parametrize("scope", ["causal", "range"])
def test_what_a_pass_saw_becomes_a_fit(scope: str) -> None:
    """The whole way; the tail behind the range was seen too, and is left out; readers are answered better."""
    values = {"policy": "reconstruction", "fit": True, "fit_scope": scope, "budget": 0.2, "light_budget": None}
    config, policy = configured_policy(KVEvictConfig(**values, min_prefix_tokens=16))
    assert policy is not None
    store = make_store()
    compressor = Compressor(config, policy, store)
    readers = compressor.new_reader_observation(0, len(SLOTS))
    chunk = readers.begin_chunk(readers, len(SLOTS), len(SLOTS) + 200, SLOTS)
    queries = torch.randn(2, 200, 6, 16)
    seen = []
    for layer in range(2):
        weights, lse = attention(queries[layer], store.k_arena[layer, SLOTS])
        chunk.record(layer, queries[layer], lse, store.k_arena[layer], SCALE)
        seen.append(weights)
    rows, keys = store.v_arena[:, SLOTS[:NUM_TOKENS]].clone(), store.k_arena[:, SLOTS[:NUM_TOKENS]].clone()
    done = compressor.compress(SLOTS[:NUM_TOKENS], 0, readers)
    segment, fit = done.segment, done.fit
    assert fit is not None and fit.num_bytes > 0
    span = Span(segment, 0, NUM_TOKENS, is_owner=True)
    errors = {}
    for name in ("selected", "fitted"):
        differences = [answers(store, span, layer, seen[layer]) - full(seen[layer], rows[layer]) for layer in range(2)]
        errors[name] = sum(float(difference.square().sum()) for difference in differences)
        while not fit.is_done:
            fit.step(segment)
        fit.apply(store, segment, [NUM_TOKENS])
    assert errors["fitted"] < 0.9 * errors["selected"]
    block = AttentionMatcher(is_causal=scope == "causal").block_len(len(SLOTS))
    head = span.segment.positions[: int(segment.indptr[1])].long()
    mask = torch.zeros(3, NUM_TOKENS, dtype=torch.bool)
    for h in range(3):
        mask[h, segment.positions[int(segment.indptr[h]) : int(segment.indptr[h + 1])].long()] = True
    want = policy.fitter.fit(expected(seen[0][..., :NUM_TOKENS], block), rows[0].transpose(0, 1), mask)
    torch.testing.assert_close(rows_of(store, segment)[1][: len(head)], want.values[0, head], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(biases_of(store, segment)[: len(head)], want.biases[0, head], rtol=1e-3, atol=1e-3)
    kept_keys = rows_of(store, segment)[0][: len(head)]
    assert torch.equal(kept_keys, keys[0, head, 0])


def full(weights: Tensor, rows: Tensor) -> Tensor:
    """[num_qo_heads, n, head_dim], what the range answers."""
    return torch.einsum("hnk,khd->hnd", weights[..., :NUM_TOKENS], rows.repeat_interleave(2, 1))


def answers(store: SegmentPacker, span: Span, layer: int, weights: Tensor) -> Tensor:
    """[num_qo_heads, n, head_dim], what a segment answers, as a part of all that its readers see."""
    runs, results = span.runs(), []
    for head in range(6):
        begin, count = int(runs.starts[layer, head // 2]), int(runs.lens[layer, head // 2])
        slots = runs.head_slots[begin : begin + count].long()
        kept = span.segment.positions[begin : begin + count].long()
        biases = biases_of(store, span.segment)
        factors = torch.ones(count) if biases is None else biases[begin : begin + count].exp()
        mine = weights[head][:, kept] * factors
        others = 1 - weights[head][:, :NUM_TOKENS].sum(1, keepdim=True)
        values = store.v_arena.view(-1, 16)[slots]
        results.append((mine @ values) / (mine.sum(1, keepdim=True) + others))
    return torch.stack(results)


def test_only_a_policy_that_fits_keeps_products() -> None:
    """And only of ranges that are read by passes, not by questions."""
    for fit, count in ((True, 1), (False, 0)):
        config, policy = configured_policy(KVEvictConfig(policy="reconstruction", fit=fit, min_prefix_tokens=16))
        assert policy is not None
        compressor = Compressor(config, policy, make_store(has_biases=fit))
        assert (compressor.new_reader_observation(0, 64).products is not None) == bool(count)
        assert compressor.new_reader_observation(0, 64, 15).products is None
        assert compressor.new_reader_observation(64, 64).products is None
        assert compressor.new_reader_observation(0, 47).products is None  # too short to be compressed


def test_a_range_that_shrinks_while_it_is_read_is_not_fitted() -> None:
    """What it evicted then is not there any more."""
    values = {"policy": "reconstruction", "fit": True, "budget": 0.5, "min_prefix_tokens": 16}
    config, policy = configured_policy(KVEvictConfig(**values))
    assert policy is not None
    compressor = Compressor(config, policy, make_store())
    readers, seen = (compressor.new_reader_observation(0, NUM_TOKENS) for _ in range(2))
    for observation in (readers, seen):
        chunk = observation.begin_chunk(observation, NUM_TOKENS, NUM_TOKENS + 9, SLOTS[:NUM_TOKENS])
        for layer in range(2):
            chunk.record(layer, torch.randn(9, 6, 16), torch.zeros(9, 6), compressor.packer.k_arena[layer], SCALE)
    before = readers.num_bytes
    readers.hand_over(compressor.compress(SLOTS[:NUM_TOKENS], 0, seen).segment)
    assert readers.products is None
    assert readers.num_bytes < before / 2


def test_a_server_warms_up_with_a_fit() -> None:
    """In memory of its own: the biases of the server's arena stay as they are."""
    config, policy = configured_policy(KVEvictConfig(policy="reconstruction", fit=True))
    assert policy is not None
    store = make_store()
    warm_up(Compressor(config, policy, store), torch.float32)
    assert store.has_biases and not Compressor(config, policy, store).stats.fits
