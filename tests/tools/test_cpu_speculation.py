"""What stands for SGLang's compiled kernels of speculative decoding on a CPU does what their sources say."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from kvevict_tools.cpu_speculation import (
    SUBSTITUTES,
    TREE_MODULE,
    Launched,
    build_tree,
    cache_locs,
    copy_to_rows,
    draft_locs,
    front_locs,
    keep_top_k,
    keep_top_p,
    last_accepted,
    pack_accepted,
    reconstruct_tree,
    sample_tree,
    verify_tree_greedy,
)
from sgl_kvevict.sglang_adapter.attention_backend import visible_drafts

TREES = [[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 0, 0]]
"""Parent of each node."""


def ancestors(parents, node):
    return [*(ancestors(parents, parents[node]) if parents[node] >= 0 else []), node]


def masks(trees):
    nodes = range(len(trees[0]))
    return torch.tensor([[[j in ancestors(tree, i) for j in nodes] for i in nodes] for tree in trees])


def links(trees):
    """(places, first child, next sibling) of every node, by looking at each pair."""
    firsts, nexts = [], []
    for tree in trees:
        children = [[j for j, parent in enumerate(tree) if parent == i] for i in range(len(tree))]
        firsts.append([below[0] if below else -1 for below in children])
        beside = [[j for j in range(i + 1, len(tree)) if tree[j] == tree[i] and tree[i] >= 0] for i in range(len(tree))]
        nexts.append([later[0] if later else -1 for later in beside])
    places = torch.arange(sum(map(len, trees))).view(len(trees), -1)
    return places, torch.tensor(firsts), torch.tensor(nexts)


def test_what_is_replaced_is_there_in_sglang():
    """A name that SGLang renames would keep its compiled kernel."""
    for owner, name in SUBSTITUTES:
        assert hasattr(importlib.import_module(owner), name), f"{owner}.{name}"
    spec = importlib.util.find_spec(TREE_MODULE)
    assert spec is not None and "def reconstruct_indices_from_tree_mask_func(" in Path(str(spec.origin)).read_text()
    assert hasattr(MHATokenToKVPool, "_init_kv_copy_and_warmup")  # ArenaKVPool: moved by torch
    assert "self.use_native_move_kv_cache" in inspect.getsource(MHATokenToKVPool._move_kv_cache_impl)


def test_trees_are_reconstructed_from_their_masks():
    bs, n = 2, 6
    positions, *found = (torch.full((bs * n,), -7), *(torch.full((bs, n), -7) for _ in range(3)))
    reconstruct_tree(masks(TREES).flatten(), torch.tensor([10, 400]), positions, *found, bs, n)
    depths = [[len(ancestors(tree, node)) - 1 for node in range(n)] for tree in TREES]
    assert positions.tolist() == [10 + depth for depth in depths[0]] + [400 + depth for depth in depths[1]]
    for got, want in zip(found, links(TREES), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "new-tokens-only"])
def test_masks_become_bits(is_full):
    """SGLang's mask, flat: what a node sees before the tree, which is everything, and in the tree."""
    seq_lens, trees = torch.tensor([3, 11]), masks(TREES)
    before = [torch.ones(6, length, dtype=torch.bool) for length in seq_lens.tolist()]
    rows = [torch.cat(parts, 1) for parts in zip(before, trees, strict=True)]
    flat = torch.cat([row.flatten() for row in rows]) if is_full else trees.flatten()
    want = [sum(1 << j for j in ancestors(tree, node)) for tree in TREES for node in range(6)]
    assert visible_drafts(flat, seq_lens, 6).tolist() == want


def accept(candidates, predicted, depth):
    """Path of the longest branch whose every token was predicted after its parent, by following it."""
    accepted = []
    for tokens, wanted, tree in zip(candidates, predicted, TREES, strict=True):
        path = [0]
        while len(path) < depth:
            below = [j for j, parent in enumerate(tree) if parent == path[-1] and tokens[j] == wanted[path[-1]]]
            if not below:
                break
            path.append(below[0])
        accepted.append(path)
    return accepted


@pytest.mark.parametrize("depth", [2, 6])
@pytest.mark.parametrize("seed", range(8))
def test_greedy_verification_follows_the_predicted_branch(seed, depth):
    torch.manual_seed(seed)
    candidates, predicted = torch.randint(0, 2, (2, 6)), torch.randint(0, 2, (2, 6))
    predicts, index, counts = torch.full((12,), -1), torch.full((2, depth), -1), torch.full((2,), -1)
    verify_tree_greedy(predicts, index, counts, candidates, *links(TREES), predicted)
    for b, path in enumerate(accept(candidates.tolist(), predicted.tolist(), depth)):
        assert index[b].tolist() == [6 * b + node for node in path] + [-1] * (depth - len(path))
        assert counts[b] == len(path) - 1
        assert predicts[index[b, : len(path)]].tolist() == predicted[b, path].tolist()


def sampled(target, draws, last, **thresholds):
    predicts, index, counts = torch.full((12,), -1), torch.full((2, 6), -1), torch.full((2,), -1)
    candidates = torch.tensor([[9, 0, 1, 2, 3, 0], [9, 0, 1, 2, 1, 2]])
    sample_tree(
        *(predicts, index, counts, candidates, *links(TREES)),
        *(draws, last, target, torch.zeros_like(target)),
        **thresholds,
    )
    return predicts, index, counts


def test_sampled_tokens_have_the_targets_distribution():
    """The first token of both trees, over evenly spread draws: whatever the drafts are, within the grid's step."""
    target = torch.tensor([0.1, 0.25, 0.4, 0.25]).expand(2, 6, 4).contiguous()
    steps = 40
    seen = torch.zeros(2, 4)
    for i in range(steps):
        for j in range(steps):
            draws, last = torch.full((2, 6), (i + 0.5) / steps), torch.full((2,), (j + 0.5) / steps)
            predicts, _, _ = sampled(target, draws, last)
            for b in range(2):
                seen[b, predicts[6 * b]] += 1
    assert (seen / steps**2 - target[:, 0]).abs().max() < 2 / steps


def test_thresholds_accept_likely_children():
    target = torch.tensor([0.05, 0.15, 0.6, 0.2]).expand(2, 6, 4).contiguous()
    none = torch.full((2, 6), 0.999), torch.full((2,), 0.999)
    assert sampled(target, *none)[2].tolist() == [0, 0]
    predicts, index, counts = sampled(target, *none, threshold_single=0.55)  # token 2: node 5 of the second tree
    assert counts.tolist() == [0, 1] and index[1, :2].tolist() == [6, 11] and predicts[6] == 2
    assert sampled(target, *none, threshold_acc=0.1)[2].tolist() == [1, 1]


def test_slots_are_read_from_rows_and_written_to_them():
    rows, table = torch.tensor([2, 0]), torch.arange(40, dtype=torch.int32).view(4, 10)
    starts, ends = torch.tensor([3, 1]), torch.tensor([6, 4])
    slots = cache_locs(
        req_pool_indices=rows, req_to_token=table, start_offset=starts, end_offset=ends,
        batch_size=2, draft_token_num=3, device="cpu",
    )  # fmt: skip
    assert slots.tolist() == [23, 24, 25, 1, 2, 3] and slots.dtype == torch.int64
    Launched(copy_to_rows)[(2,)](rows, table, starts, ends, torch.arange(100, 106), 10, 2)
    assert table[2].tolist() == [20, 21, 22, 100, 101, 102, 26, 27, 28, 29] and table[0, 1:4].tolist() == [
        103,
        104,
        105,
    ]
    packed = torch.zeros(6, dtype=torch.int64)
    pack_accepted(torch.tensor([[0, 2, -1], [5, -1, -1]]), torch.arange(50, 56), packed, 8)
    assert packed.tolist() == [50, 52, 55, 0, 0, 0]


def selected(tree, topk):
    """How SGLang numbers the drafts of a tree: a draft is a place in a group of ``topk`` that follow one draft.

    Returns the draft that each group follows, and the numbers of the tree's drafts; both have others among them.
    """
    numbers, parents = {}, [-7]
    for node in range(1, len(tree)):
        parent = tree[node]
        group = (
            0 if parent == 0 else next((g for g, p in enumerate(parents) if g and p == numbers[parent]), len(parents))
        )
        if group == len(parents):
            parents.append(numbers[parent])
        place = sum(tree[other] == parent for other in range(1, node))
        numbers[node] = group * topk + place
    order = sorted(numbers, key=lambda node: numbers[node])
    return parents, [numbers[node] for node in order], order


@pytest.mark.parametrize("tree", [[-1, 0, 0, 1, 1, 2], [-1, 0, 0, 0, 2, 4], [-1, 0, 1, 2, 3, 4]])
def test_trees_are_built_from_the_selected_drafts(tree):
    n, topk = len(tree), 3
    parents, numbers, order = selected(tree, topk)
    assert order == list(range(1, n))
    mask, positions = torch.zeros(2 * n * n, dtype=torch.bool), torch.zeros(2 * n, dtype=torch.long)
    found = [torch.full((2, n), -7) for _ in range(3)]
    pair = torch.tensor([parents] * 2), torch.tensor([numbers] * 2), torch.tensor([10, 40])
    build_tree(*pair, mask, positions, *found, topk, 9, n, 1)
    assert torch.equal(mask.view(2, n, n), masks([tree, tree]))
    depths = [len(ancestors(tree, node)) - 1 for node in range(n)]
    assert positions.tolist() == [10 + depth for depth in depths] + [40 + depth for depth in depths]
    for got, want in zip(found, links([tree, tree]), strict=True):
        assert torch.equal(got, want)


def test_a_draft_whose_parent_was_not_selected_is_reached_by_no_link():
    """It was as likely as the one that it follows: draft 4 follows draft 1, and only 0 and 4 were selected."""
    mask, positions = torch.zeros(9, dtype=torch.bool), torch.zeros(3, dtype=torch.long)
    found = [torch.full((1, 3), -7) for _ in range(3)]
    topk = 3
    build_tree(
        torch.tensor([[-7, 1]]), torch.tensor([[0, 4]]), torch.tensor([10]), mask, positions, *found, topk, 9, 3, 1
    )
    assert mask.view(3, 3).tolist() == [[True, False, False], [True, True, False], [False, False, True]]
    assert [link.tolist() for link in found[1:]] == [[[1, -1, -1]], [[-1, -1, -1]]]


def test_slots_and_tokens_of_drafts():
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    slots = torch.zeros(8, dtype=torch.int64)
    draft_locs(torch.tensor([2, 0]), table, torch.tensor([3, 1]), slots, 2, 2)
    assert slots.tolist() == [23, 24, 25, 26, 1, 2, 3, 4]
    front = torch.zeros(8, dtype=torch.int64)
    front_locs(torch.tensor([1, 3]), slots, front)
    assert front.tolist() == [23, 1, 2, 3, 0, 0, 0, 0]
    last = torch.zeros(2, dtype=torch.int32)
    last_accepted(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 1]), last, 3, 2)
    assert last.tolist() == [7, 8]


@pytest.mark.parametrize("limit", [1, 2, 5, 7, 1 << 30, 0.01, 0.3, 0.75, 0.999, 1.0])
def test_likely_tokens_keep_their_share(limit):
    """Token by token, the likeliest first, until there are enough; an equal one goes with it."""
    torch.manual_seed(3)
    probs = torch.randn(6, 7).mul(2).softmax(-1)
    probs[0] = torch.tensor([0.2, 0.1, 0.2, 0.2, 0.1, 0.1, 0.1])  # equal ones
    want = torch.zeros_like(probs)
    for row, kept in zip(probs.tolist(), want, strict=True):
        total = 0.0
        ranked = sorted(row, reverse=True)
        for number, value in enumerate(ranked):
            if total >= limit if isinstance(limit, float) else number >= limit:
                break
            total += value
            least = value
        for token, value in enumerate(row):
            kept[token] = value if value >= least else 0.0
        kept /= kept.sum()
    keep = keep_top_p if isinstance(limit, float) else keep_top_k
    torch.testing.assert_close(keep(probs, torch.full((6,), limit)), want)


def test_rows_have_limits_of_their_own():
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
    assert keep_top_k(probs, torch.tensor([1, 2], dtype=torch.int32)).tolist() == [
        [1.0, 0.0, 0.0],
        pytest.approx([0.0, 0.375, 0.625]),
    ]
    assert keep_top_p(probs, torch.tensor([0.6, 0.4])).tolist() == [pytest.approx([0.625, 0.375, 0.0]), [0.0, 0.0, 1.0]]
