"""Kept generated tokens, block by block, and attention over them, against a simulation in float64.

The simulation follows one head at a time and knows nothing of slots, segments or blocks of queries.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helpers.packing import write_block
from sgl_kvevict.attention import AttentionBatch, build_attention
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import build_policy
from sgl_kvevict.policies.generated import share_out
from sgl_kvevict.segments import Compressor, GeneratedCompressor, SegmentPacker
from sgl_kvevict.segments.query_lanes import QueryLanes

LAYERS, HEADS, GROUP, DIM = 2, 2, 2, 8
SCALE = 1 / math.sqrt(DIM)
BLOCK, TAIL, SINKS, WINDOW, POOL = 10, 6, 2, 6, 3
STEPS = 130
BETA = 0.7


class Head:
    """One KV head of one layer: its entries, uncompressed ones last, and what the policy sums up of each."""

    def __init__(self, policy):
        self.policy = policy
        self.positions, self.keys, self.values, self.sums = [], [], [], []
        self.rows = []  # attention rows of the last queries, by position
        self.num_compressed = 0
        self.threshold = None

    def attend(self, position, queries, key, value):
        """Outputs of the group's queries [GROUP, DIM] over all entries, the new token's included."""
        self.positions.append(position)
        self.keys.append(key)
        self.values.append(value)
        self.sums.append(0.0)
        logits = SCALE * queries @ np.array(self.keys).T
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        self.sums = list(np.array(self.sums) + weights.mean(0))
        self.rows = [*self.rows, (queries, logits.max(-1) + np.log(np.exp(logits - logits.max(-1)[:, None]).sum(-1)))]
        return weights @ np.array(self.values)

    def scores(self, num):
        keys = np.array(self.keys[:num])
        if self.policy in ("h2o", "d2o"):
            return np.array(self.sums[:num])
        if self.policy == "streaming-llm":
            return np.arange(num)
        pooled = []
        for queries, lse in self.rows[-WINDOW:]:
            row = np.exp(SCALE * queries @ keys.T - lse[:, None])
            padded = np.pad(row, ((0, 0), (POOL // 2, POOL // 2)), constant_values=-np.inf)
            pooled.append(np.max([padded[:, i : i + num] for i in range(POOL)], axis=0))
        return np.mean(pooled, axis=(0, 1))

    def compress(self, end, num_kept):
        num = sum(position < end for position in self.positions)
        scores, kept = self.scores(num), set(range(SINKS))
        ratio = {"h2o": 0.5, "d2o": 0.25}.get(self.policy, 0)
        kept |= set(range(num - int((num_kept - SINKS) * ratio), num))
        for i in np.argsort(-scores, kind="stable"):
            if len(kept) == num_kept:
                break
            kept.add(int(i))
        if self.policy == "d2o":
            self.merge(num, sorted(kept))
        rest = [*sorted(kept), *range(num, len(self.positions))]
        for name in ("positions", "keys", "values", "sums"):
            setattr(self, name, [getattr(self, name)[i] for i in rest])
        self.num_compressed = num_kept
        return self.positions[:num_kept]

    def merge(self, num, kept):
        """D2O, Eq. 9-12, into later kept tokens."""
        unit = np.array(self.keys[:num]) / np.linalg.norm(self.keys[:num], axis=-1, keepdims=True)
        nearest = {}
        for i in set(range(num)) - set(kept):
            later = [j for j in kept if j > i]
            if later:
                cosines = [float(unit[i] @ unit[j]) for j in later]
                nearest[i] = later[int(np.argmax(cosines))], max(cosines)
        if not nearest:
            return
        mean = float(np.mean([cosine for _, cosine in nearest.values()]))
        self.threshold = mean if self.threshold is None else BETA * mean + (1 - BETA) * self.threshold
        keys, values = list(self.keys), list(self.values)
        for j in kept:
            joined = [
                (i, cosine) for i, (target, cosine) in nearest.items() if target == j and cosine >= self.threshold
            ]
            weights = np.exp([1.0] + [cosine for _, cosine in joined])
            weights /= weights.sum()
            sources = [j] + [i for i, _ in joined]
            keys[j] = sum(w * self.keys[i] for w, i in zip(weights, sources, strict=True))
            values[j] = sum(w * self.values[i] for w, i in zip(weights, sources, strict=True))
        self.keys, self.values = keys, values


class Run:
    """One request that generates, on a pool of its own."""

    def __init__(self, policy, budget, block=BLOCK, **options):
        options = {"budget_rule": "uniform", **options}
        if policy == "snapkv":
            options |= {"window_size": WINDOW, "kernel_size": POOL}
        if policy in ("d2o", "streaming-llm"):
            options["num_sink_tokens"] = SINKS
        self.config = KVEvictConfig(
            policy=policy,
            budget=budget,
            tail_tokens=TAIL,
            sink_tokens=SINKS,
            decode_block=block,
            policy_options=options,
        )
        geometry = KVGeometry(LAYERS, HEADS * GROUP, HEADS, DIM, 400)
        self.k, self.v = (torch.zeros(LAYERS, 400, HEADS, DIM) for _ in range(2))
        store = SegmentPacker(geometry, self.k, self.v)
        self.whole = Compressor(self.config, build_policy(policy, options), store)
        self.compressor = GeneratedCompressor(self.whole)
        self.attention = build_attention("torch", geometry, self.k, self.v)
        self.generated = self.compressor.new(0)
        self.row = torch.zeros(1, 400, dtype=torch.int32)
        self.free = list(range(1, 400))

    def step(self, position, q, k, v):
        """Outputs of all layers: [LAYERS, HEADS * GROUP, DIM]."""
        slot = self.free.pop(0)
        self.row[0, position] = slot
        self.k[:, slot], self.v[:, slot] = k, v
        segment = self.generated.segment
        batch = AttentionBatch(
            paths=(() if segment is None else segment.runs(),),
            seq_lens=[position + 1],
            extend_lens=None,
            req_pool_indices=torch.zeros(1, dtype=torch.int64),
            req_to_token=self.row,
        )
        self.attention.plan(batch)
        step = self.compressor.step([(0, position, self.generated)], 1)
        outs = []
        for layer in range(LAYERS):
            out, lse = self.attention.run(layer, q[layer][None], SCALE)
            if step is not None:
                step.record(layer, q[layer][None], lse, SCALE)
            outs.append(out[0])
        if self.compressor.is_full(self.generated):
            self.compressor.count(self.generated, self.slots(position + 1))
        return torch.stack(outs)

    def slots(self, end):
        return self.row[0, self.generated.compressed_end : end].long()

    def compress(self, position):
        """Compress what is due; the positions that each (layer, head) then has, or None."""
        end = position + 1 - TAIL
        num_new = end - self.generated.compressed_end
        if num_new < self.config.decode_block:
            return None
        freed = write_block(self.whole, self.compressor, self.generated, self.slots(position + 1), num_new)
        self.free += freed.tolist()
        segment = self.generated.segment
        return [
            run.tolist() for run in segment.storage.positions.tensor_split(segment.storage.parts[0].indptr[1:-1].long())
        ]


@pytest.mark.parametrize("budget", [0.4, 20])
@pytest.mark.parametrize("policy", ["h2o", "d2o", "streaming-llm", "snapkv"])
def test_what_is_kept_and_attended_to(policy, budget):
    generator = np.random.default_rng(7)
    run = Run(policy, budget)
    heads = [[Head(policy) for _ in range(HEADS)] for _ in range(LAYERS)]
    num_blocks = 0
    for position in range(STEPS):
        q = generator.standard_normal((LAYERS, HEADS * GROUP, DIM)).astype(np.float32)
        k, v = (generator.standard_normal((LAYERS, HEADS, DIM)).astype(np.float32) for _ in range(2))
        outs = run.step(position, *(torch.from_numpy(part) for part in (q, k, v)))
        for layer in range(LAYERS):
            for head in range(HEADS):
                queries = slice(head * GROUP, (head + 1) * GROUP)
                out = heads[layer][head].attend(
                    position,
                    q[layer, queries].astype(float),
                    k[layer, head].astype(float),
                    v[layer, head].astype(float),
                )
                np.testing.assert_allclose(outs[layer, queries].numpy(), out, rtol=1e-4, atol=1e-5)
        kept = run.compress(position)
        if kept is None:
            continue
        num_blocks += 1
        end = position + 1 - TAIL
        num_kept = run.config.num_slots(end)
        assert run.generated.segment.num_slots == num_kept
        wanted = [head.compress(end, num_kept) for layer in heads for head in layer]
        assert kept == wanted
    assert num_blocks == 12


def test_dense_layers_keep_their_share_of_every_block():
    generator = np.random.default_rng(3)
    run = Run("d2o", 0.4, block=30, budget_rule="density")
    shares = []
    for position in range(STEPS):
        q = generator.standard_normal((LAYERS, HEADS * GROUP, DIM)).astype(np.float32)
        q[1] *= 6  # sparse attention: a large variance
        k, v = (generator.standard_normal((LAYERS, HEADS, DIM)).astype(np.float32) for _ in range(2))
        run.step(position, *(torch.from_numpy(part) for part in (q, k, v)))
        if run.compress(position) is not None:
            assert sum(run.generated.lens) == LAYERS * run.generated.segment.num_slots
            shares.append(run.generated.lens[0] / sum(run.generated.lens))
    assert shares[0] > 0.6
    np.testing.assert_allclose(shares, shares[0], atol=0.1)


def test_everything_is_kept_bit_for_bit_with_a_budget_of_one():
    generator = torch.Generator().manual_seed(1)
    run = Run("d2o", 1.0)
    keys = []
    for position in range(60):
        q = torch.randn(LAYERS, HEADS * GROUP, DIM, generator=generator)
        k, v = (torch.randn(LAYERS, HEADS, DIM, generator=generator) for _ in range(2))
        keys.append(k)
        run.step(position, q, k, v)
        run.compress(position)
    segment = run.generated.segment
    rows = run.k.view(-1, DIM)[segment.storage.parts[0].rows.long()].view(LAYERS, HEADS, -1, DIM)
    assert torch.equal(rows, torch.stack(keys[: segment.end]).permute(1, 2, 0, 3))


def test_lanes_take_no_more_memory_than_they_may():
    """Requests begin one after the other, and the buffers grow with them: up to nine lanes, whose bytes are allowed."""
    geometry, depth = KVGeometry(LAYERS, HEADS * GROUP, HEADS, DIM, 8), 2
    num_bytes = 9 * depth * LAYERS * HEADS * GROUP * (DIM + 1) * 4  # of a query and its log-sum-exp
    lanes, taken = QueryLanes(geometry, depth, num_bytes, 4), []
    while (lane := lanes.take()) is not None:
        taken.append(lane)
        places = lanes.places(taken, [0] * len(taken), torch.device("cpu"))
        rows = torch.rand(len(taken), HEADS * GROUP, DIM)
        for layer in range(LAYERS):
            lanes.record(layer, places, rows, rows[..., 0], SCALE)
        assert lanes.rows(0, places)[0].equal(rows) and lanes.num_bytes <= num_bytes
    assert len(taken) == 9


def test_a_total_is_shared_out_exactly():
    assert share_out([5, 5, 5], [9, 9, 9], 21) == [7, 7, 7]
    assert share_out([6, 3, 1], [10, 10, 10], 15) == [9, 5, 1]
    assert share_out([9, 1, 0], [10, 10, 10], 14) == [10, 3, 1]
    assert share_out([9, 1, 0], [20, 20, 20], 10, least=2) == [6, 2, 2]
    with pytest.raises(ValueError, match="a total of 9 does not fit"):
        share_out([1, 1], [4, 4], 9)
