"""After the server has warmed up, no prompt of any length calls for a compilation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.decisions import built
from helpers.packing import compress, repack, resize
from helpers.specialisations import recorded
from helpers.statistics import random_coding
from kvevict_kernels.ragged_decode.host_lists import SPLIT_ROWS
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.segments.segment import Segment, View
from sgl_kvevict.segments.sources import TokenRange
from sgl_kvevict.segments.warm_up import _observe, _resize, _written, warm_up

GEOMETRY = KVGeometry(num_layers=2, num_qo_heads=8, num_kv_heads=2, head_dim=16, num_token_slots=1003)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the device here")
    monkeypatch.setattr("kvevict_kernels.dispatch.TRITON_DEVICES", ("cuda", "cpu"))
    yield


STORED = pytest.mark.parametrize("stored", [torch.float16, torch.float8_e4m3fn], ids=str)


def test_rows_of_few_bits_of_other_lengths():
    """From 16 bits to the least share, of prompts with and without sinks, cut and repacked on the way, and read."""
    geometry = replace(GEOMETRY, head_dim=32)
    config = KVEvictConfig(policy="snapkv")
    rows = torch.randn(2, *geometry.arena_shape).half()
    packer = SegmentPacker(geometry, *rows, coding=random_coding(geometry, rows[0]))
    compressor = Compressor(config, built(config.policy), packer)
    with recorded() as warm:
        warm_up(compressor, torch.float16)
    with recorded() as served:
        for first, num_tokens, start in ((1, 97, 0), (101, 176, 301)):  # rows that were packed are no input
            slots = torch.arange(1003)[first : first + num_tokens]
            queries = torch.randn(num_tokens, geometry.num_qo_heads, geometry.head_dim).half()
            observation = _observe(compressor, queries, slots)
            keys = compressor.rank(slots, start, observation, turn=0).keys
            tokens = TokenRange(slots, start, keys, config.num_sinks(num_tokens, start))
            first_size, *sizes = (config.num_slots(num_tokens, start, share) for share in config.shares)
            packed = _written(compressor, tokens, first_size, observation)
            segment = Segment(geometry, start, start + num_tokens, packed)
            for num_slots in sizes:
                _resize(compressor, segment, segment.live_view, min(num_slots, segment.num_slots))
            _resize(compressor, segment, View(segment, start, start + num_tokens // 3))
    assert_nothing_new(warm, served)


def arena(stored: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(42)
    k, v = torch.randn(2, *GEOMETRY.arena_shape).to(stored)
    return k, v


def assert_nothing_new(warm: dict[str, set[str]], served: dict[str, set[str]]) -> None:
    new = {name: len(keys - warm.get(name, set())) for name, keys in served.items()}
    assert served and not any(new.values()), f"compilations while serving: {new}"


@STORED
@pytest.mark.parametrize("policy_name", ["ada-snapkv", "chunkkv", "d2o"])
def test_compressions_of_other_lengths(policy_name, stored):
    """Odd and a multiple of 16, at odd slots; cut in the middle, and repacked."""
    config = KVEvictConfig(policy=policy_name, budget=0.3)
    compressor = Compressor(config, built(policy_name), SegmentPacker(GEOMETRY, *arena(stored)))
    with recorded() as warm:
        warm_up(compressor, torch.float16)
    with recorded() as served:
        for first, num_tokens in ((1, 97), (5, 176)):
            slots = torch.arange(1003)[first : first + num_tokens]
            queries = torch.randn(num_tokens, GEOMETRY.num_qo_heads, GEOMETRY.head_dim).half()
            observation = _observe(compressor, queries, slots)
            segment, _ = compress(compressor, slots, 0, observation)
            end = num_tokens // 3
            segment.runs_of(0, end)
            repack(compressor.packer, segment, end)
            resize(compressor.packer, segment, segment.num_slots // 2)
    assert_nothing_new(warm, served)


@pytest.mark.parametrize("policy_name", ["ada-snapkv", "chunkkv", "d2o"])
@pytest.mark.parametrize("devices", [("cuda",), ("cuda", "cpu")], ids=["torch", "triton"])
def test_a_pool_of_16_bits_under_a_model_in_float32(monkeypatch, devices, policy_name):
    """Queries in float32 are observed beside rows of bfloat16, and rank, pack and shrink them."""
    monkeypatch.setattr("kvevict_kernels.dispatch.TRITON_DEVICES", devices)
    packer = SegmentPacker(GEOMETRY, *arena(torch.bfloat16))
    warm_up(Compressor(KVEvictConfig(policy=policy_name, budget=0.3), built(policy_name), packer), torch.float32)


@pytest.mark.parametrize(
    ("stored", "has_extras"),
    [(torch.float16, False), (torch.float8_e4m3fn, False), (torch.float16, True)],
    ids=["float16", "fp8", "windows-sinks"],
)
def test_batches_of_other_sizes(stored, has_extras):
    """Decode rows that share or not, few new tokens, many with split keys, long prefills; spans cut anywhere."""
    geometry = replace(GEOMETRY, windows=(33, 0)) if has_extras else GEOMETRY
    sink_logits = torch.randn(8).bfloat16() if has_extras else None
    attention = TritonAttention(geometry, *arena(stored), q_dtype=torch.float16)
    with recorded() as warm:
        attention.warm_up(None if sink_logits is None else sink_logits.dtype)
    assert not attention._recent._kept
    head_slots = torch.randint(0, 4000, (401,), dtype=torch.int32)
    lens = torch.tensor([[30, 7], [0, 64]], dtype=torch.int32)
    starts = torch.tensor([[5, 100], [0, 301]], dtype=torch.int32)
    positions = torch.arange(401, dtype=torch.int32) % 100
    span, other = (SpanRuns(head_slots, starts, lens, tokens, positions=positions) for tokens in (70, 113))
    long = SPLIT_ROWS // 4 + 1
    with recorded() as served:
        for paths, new_lens in (
            (((),), [1]),
            (((span,), (), (other, span)), [1, 1, 1]),
            (((span,),) * 7, [1] * 7),
            (((span,), (other,)), [3, 17]),
            (((), (span,), (other,)), [long, 5, long + 30]),
        ):
            compressed_lens = [sum(one.num_tokens for one in path) for path in paths]
            batch = AttentionBatch(
                paths=paths,
                seq_lens=[start + 41 + new for start, new in zip(compressed_lens, new_lens, strict=True)],
                extend_lens=None if max(new_lens) == 1 else new_lens,
                req_pool_indices=torch.arange(9)[1 : len(paths) + 1],
                req_to_token=torch.randint(1, 1003, (10, 400), dtype=torch.int32),
            )
            attention.plan(batch)
            for layer in (0, 1):
                attention.run(layer, torch.randn(sum(new_lens), 8, 16).half(), 0.25, sink_logits)
    assert_nothing_new(warm, served)
