"""Trees of new tokens: every node reads what a decode step after its ancestors would read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.poison import poisoned_allocations
from helpers.specialisations import recorded
from helpers.tolerance import FLOAT32_NOISE, assert_accurate, assert_same_bits, rounding_noise
from sgl_kvevict.attention.backend import build_attention
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.cpu.numba_attention import NumbaAttention
from sgl_kvevict.attention.cpu.torch_attention import TorchAttention
from sgl_kvevict.attention.interface import Attention
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.support import MAX_DRAFTS

NOISE = 8 * FLOAT32_NOISE
"""Two float32 softmaxes over a few hundred keys."""
CHAIN = [-1, 0, 1, 2, 3, 4]
TREE = [-1, 0, 0, 1, 1, 2, 3, 0]
"""Parent of each node: three children of the root, of which two have children."""


def ancestors(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to a node, both included."""
    return [*(ancestors(parents, parents[node]) if parents[node] >= 0 else []), node]


def bits(trees: list[list[int]]) -> Tensor:
    """``AttentionBatch.visible`` of one tree per request, given as parents."""
    numbers = [sum(1 << j for j in ancestors(tree, node)) for tree in trees for node in range(len(tree))]
    return torch.tensor([number - (number >> 63 << 64) for number in numbers])


def batch_of(world, trees: list[list[int]]) -> AttentionBatch:
    """All requests; the last tokens of each are a tree."""
    return replace(world.batch([len(tree) for tree in trees]), visible=bits(trees))


def unrolled(world, trees: list[list[int]], layer: int, q: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per node, what a decode step gives whose request ends with the node and its ancestors (``World.expected``)."""
    paths, compressed_lens, rows, seq_lens = world.paths, world.compressed_lens, world.rows, world.seq_lens
    scratch, results, first = world.free_rows[-1], [], 0
    try:
        for i, tree in enumerate(trees):
            start = seq_lens[i] - len(tree)
            for node in range(len(tree)):
                kept = ancestors(tree, node)
                row = world.req_to_token[rows[i]]
                world.req_to_token[scratch] = row
                world.req_to_token[scratch, start : start + len(kept)] = row[start + torch.tensor(kept)]
                world.paths, world.compressed_lens, world.rows = [paths[i]], [compressed_lens[i]], [scratch]
                world.seq_lens = [start + len(kept)]
                results.append(world.expected(layer, q[first + node : first + node + 1]))
            first += len(tree)
    finally:
        world.paths, world.compressed_lens, world.rows, world.seq_lens = paths, compressed_lens, rows, seq_lens
    return results


def check(world, attention: Attention, trees: list[list[int]]) -> None:
    """Compare every node of all layers; fresh allocations are NaN."""
    attention.plan(batch_of(world, trees))
    news = [len(tree) for tree in trees]
    is_interpreted = not isinstance(attention, (NumbaAttention, TorchAttention))
    noise = max(NOISE, rounding_noise(world.dtype, interpreted=is_interpreted))
    for layer in range(world.geometry.num_layers):
        q = world.queries(news)
        with poisoned_allocations():
            out, lse = attention.run(layer, q, world.sm_scale, world.sink_logits)
        want_out, want_lse, baseline = (
            torch.cat(parts) for parts in zip(*unrolled(world, trees, layer, q), strict=True)
        )
        assert_accurate(f"out of layer {layer}", out, want_out, baseline, noise=noise)
        assert_accurate(f"lse of layer {layer}", lse, want_lse, want_lse, noise=NOISE)


def sharers(world) -> list[list[int]]:
    """Spans that several trees share; a tree on nothing; one whose root is its first own token."""
    shared = world.uneven_span(40)
    below = world.uneven_span(21, start=shared.num_tokens)
    for path, own in (((shared,), 20), ((shared, below), 9), ((shared, below), 30), ((), 40), ((shared,), len(TREE))):
        world.add(path, own)
    return [TREE, CHAIN, TREE[:5], TREE, TREE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trees_and_chains_of_sharers(build, make_world, dtype):
    world = make_world(2, 2, 16, dtype=dtype, num_layers=1, num_token_slots=700)
    trees = sharers(world)
    check(world, build(world), trees)


@pytest.mark.parametrize(("windows", "lens"), [((0,), (330, 12)), ((64, 70), (110,))], ids=["full", "windows"])
def test_more_q_rows_than_the_split_kernel_takes(build, make_world, windows, lens):
    """A tree of 64 nodes, the most, whose last node sees itself by the sign bit; a suffix of several chunks."""
    world = make_world(1, 3, 16, dtype=torch.float32, windows=windows, num_token_slots=900)
    span = world.uneven_span(50)
    for num_own in lens:
        world.add((span,), num_own)
    widest = [-1] + [max(node // 2 - 1, 0) for node in range(1, MAX_DRAFTS)]
    check(world, build(world), [widest, CHAIN][: len(lens)])


def test_windows_count_a_node_at_its_depth(build, make_world):
    """Nodes of one depth have one position, in spans, among own tokens and among the new ones; sinks count once."""
    world = make_world(1, 2, 16, dtype=torch.float32, windows=(0, 9, 25, 1000), num_token_slots=700)
    trees = sharers(world)
    world.sink_logits = torch.randn(2)
    check(world, build(world), trees)


def test_a_chain_is_a_causal_mask(build, make_world):
    """The same bits as an ordinary extend."""
    world = make_world(2, 3, 16, dtype=torch.float32, windows=(0, 20), num_token_slots=700)
    shared = world.uneven_span(40)
    world.add((shared,), 300)
    world.add((shared,), 17)
    causal, tree = build(world), build(world)
    causal.plan(world.batch([6, 6]))
    tree.plan(batch_of(world, [CHAIN, CHAIN]))
    for layer in range(2):
        q = world.queries([6, 6])
        for got, want in zip(tree.run(layer, q, 0.3), causal.run(layer, q, 0.3), strict=True):
            assert_same_bits("a chain", got, want)


def test_nodes_do_not_depend_on_their_siblings(make_world):
    """On a CPU a node's result has the same bits, whatever hangs beside it."""
    world = make_world(2, 3, 16, dtype=torch.float32, num_token_slots=700)
    world.add((world.uneven_span(40),), 30)
    attention, q = NumbaAttention(world.geometry, world.k, world.v), world.queries([8])
    results = []
    for tree in ([-1, 0, 1, 0, 3, 0, 5, 6], [-1, 0, 1, 2, 3, 4, 5, 6]):
        attention.plan(batch_of(world, [tree]))
        results.append(attention.run(0, q, world.sm_scale))
    for got, want in zip(*results, strict=True):
        assert_same_bits("nodes 0 to 2", got[:3], want[:3])


def test_a_batch_of_trees_and_a_batch_of_chains_alternate(build, make_world):
    """What is kept of one batch says nothing about the next."""
    world = make_world(2, 2, 16, dtype=torch.float32, num_token_slots=400)
    world.add((world.uneven_span(30),), 20)
    attention = build(world)
    for tree in (TREE, list(range(-1, 7)), TREE):
        check(world, attention, [tree])


@pytest.mark.usefixtures("interpreted", "small_chunks", "flashinfer_plans", "flashinfer_is_chosen")
def test_with_flashinfer_trees_are_our_kernels(make_world, flashinfer_plans):
    world = make_world(1, 2, 64, num_layers=1, num_token_slots=500)
    trees = sharers(world)
    attention = build_attention("flashinfer", world.geometry, world.k, world.v, verifies=True)
    before = len(flashinfer_plans)
    check(world, attention, trees)
    assert len(flashinfer_plans) == before
    with pytest.raises(InvariantError, match="tree of new tokens"):
        build_attention("flashinfer", world.geometry, world.k, world.v).plan(batch_of(world, trees))


@pytest.mark.usefixtures("interpreted")
def test_a_warm_up_compiles_what_trees_need(make_world, monkeypatch):
    """Trees of few and of many q rows, in layers with and without a window."""
    monkeypatch.setattr("sgl_kvevict.attention.triton.attention.WARM_UP_KEYS", 0)  # the interpreter takes long
    world = make_world(1, 3, 16, windows=(0, 80), num_token_slots=900)
    attention = TritonAttention(world.geometry, world.k, world.v, verifies=True)
    world.k[:, 0] = world.v[:, 0] = 0.0
    with recorded() as warm:
        attention.warm_up()
    span = world.uneven_span(30)
    world.add((span,), 80)
    world.add((span,), 30)
    with recorded() as served:
        for trees in ([CHAIN, TREE], [list(range(-1, MAX_DRAFTS - 1)), TREE]):
            attention.plan(batch_of(world, trees))
            for layer in range(2):
                attention.run(layer, world.queries([len(tree) for tree in trees]), world.sm_scale)
    assert all(keys <= warm[kernel] for kernel, keys in served.items())


def test_contradictory_trees_are_refused(make_world):
    world = make_world(1, 1, 16, num_token_slots=200)
    world.add((), 80)
    with pytest.raises(InvariantError, match="visible: expected one number for each of 6 new tokens"):
        replace(world.batch([6]), visible=bits([TREE]))
    with pytest.raises(InvariantError, match="at most 64 per request"):
        replace(world.batch([65]), visible=torch.ones(65, dtype=torch.int64))
