"""specs/d2o.md section 10, eviction and merging."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.decisions import Decision, Run, built, decide
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import LayerView, Signal, build_policy
from sgl_kvevict.policies.methods.d2o import NearestKeyMerger, mean_similarity, merge_plan, nearest_kept
from sgl_kvevict.ragged import MergePlan


def view_of(keys: Tensor, values: Tensor | None = None, sums: Tensor | None = None) -> LayerView:
    """One layer whose range is all of keys [N, H, D]."""
    return LayerView(
        layer=0,
        start=0,
        k_buffer=keys,
        v_buffer=keys if values is None else values,
        token_slots=torch.arange(keys.shape[0]),
        sm_scale=1.0,
        signals={} if sums is None else {Signal.ACCUMULATED_ATTENTION: sums},
    )


def mask_of(num_tokens: int, kept: list[int]) -> Tensor:
    mask = torch.zeros(1, 1, num_tokens, dtype=torch.bool)
    mask[0, 0, kept] = True
    return mask


def merge(keys: list[list[float]], kept: list[int]) -> MergePlan:
    view = view_of(torch.tensor(keys)[:, None])
    return NearestKeyMerger().merge([view], mask_of(len(keys), kept))


def threshold(keys: list[list[float]], kept: list[int]) -> float:
    """Below which tokens are not merged."""
    mask = mask_of(len(keys), kept)[0]
    similarity, _ = nearest_kept(torch.tensor(keys)[None], mask, len(kept))
    return float(mean_similarity(similarity, ~mask & similarity.isfinite()))


def sources(plan: MergePlan) -> list[dict[int, float]]:
    """Per kept entry: token index -> weight."""
    bounds = plan.indptr.tolist()
    return [dict(zip(plan.indices[a:b].tolist(), plan.weights[a:b].tolist(), strict=True)) for a, b in pairwise(bounds)]


def apply(plan: MergePlan, rows: Tensor) -> Tensor:
    """Merged rows [entries, D] of rows [N, D] (one layer, one head)."""
    bounds = plan.indptr.tolist()
    return torch.stack([plan.weights[a:b] @ rows[plan.indices[a:b]] for a, b in pairwise(bounds)])


def unit(cosine: float) -> list[float]:
    return [cosine, math.sqrt(1 - cosine**2)]


GOLDEN_KEYS = [[1.0, 0], [0.8, 0.6], [0, 1.0], [-0.28, 0.96], [-1.0, 0], [0.6, -0.8]]
GOLDEN_SUMS = [3.0, 0.4, 1.2, 0.3, 0.8, 0.3]


def test_golden_trace() -> None:
    """10.18, prefill: v_j = j; the evicted tokens 1 and 3 come first, so that any kept one is a later one."""
    tokens = [1, 3, 0, 2, 4, 5]
    keys = [GOLDEN_KEYS[token] for token in tokens]
    plan = merge(keys, [2, 3, 4, 5])
    assert threshold(keys, [2, 3, 4, 5]) == pytest.approx(0.88)
    assert sources(plan) == [
        {2: 1.0},
        {3: pytest.approx(0.509999, abs=1e-6), 1: pytest.approx(0.490001, abs=1e-6)},
        {4: 1.0},
        {5: 1.0},
    ]
    torch.testing.assert_close(apply(plan, torch.tensor(keys))[1], torch.tensor([-0.1372, 0.9804]), atol=1e-5, rtol=0)
    assert float(apply(plan, torch.tensor(tokens).float()[:, None])[1]) == pytest.approx(2.490001, abs=1e-6)


def test_merges_go_to_later_tokens_only() -> None:
    """10.18 in its own order (T = 1, N = 2, M = 1): 1 may join {2, 4, 5}, 3 may join {4, 5}."""
    policy = built("d2o", num_sink_tokens=1, recent_ratio=0.34)
    assert policy.num_sink_tokens == 1
    seen = view_of(torch.tensor(GOLDEN_KEYS)[:, None], sums=torch.tensor([GOLDEN_SUMS]))
    decision = decide(policy, lambda _: seen, KVGeometry(1, 1, 1, 2, 6), 4, 0)
    assert decision.selection.indices.tolist() == [0, 2, 4, 5]
    assert decision.merge is not None
    # best later cosines: 1 -> 2: 0.6; 3 -> 4: 0.28; threshold 0.44
    assert threshold(GOLDEN_KEYS, [0, 2, 4, 5]) == pytest.approx(0.44, abs=1e-6)
    assert [sorted(entry) for entry in sources(decision.merge)] == [[0], [1, 2], [4], [5]]


def test_threshold_is_the_mean_and_equality_recalls() -> None:
    """10.9, 10.10: maxima .9, .5, .7 -> tau .7; tokens 0 and 2 merge."""
    keys = [unit(0.9), unit(0.5), unit(0.7), [1.0, 0]]
    assert threshold(keys, [3]) == pytest.approx(0.7)
    assert sorted(sources(merge(keys, [3]))[0]) == [0, 2, 3]
    same = merge([unit(0.6), unit(0.6), [1.0, 0]], [2])
    assert sorted(sources(same)[0]) == [0, 1, 2]  # all equal: all recalled


def test_nothing_is_merged_if_nothing_is_evicted() -> None:
    plan = merge([[1.0, 0], unit(0.6)], [0, 1])
    assert plan.indices.tolist() == [0, 1] and plan.weights.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("cosine", "own", "other"),
    [(1.0, 0.5, 0.5), (0.6, 0.598688, 0.401312), (0.0, 0.731059, 0.268941), (-1.0, 0.880797, 0.119203)],
)
def test_pair_weights(cosine: float, own: float, other: float) -> None:
    """10.11."""
    plan = merge([unit(cosine), [1.0, 0]], [1])
    assert plan.weights.tolist() == pytest.approx([own, other], abs=1e-6)


def test_pair_rows() -> None:
    """10.12."""
    rows = torch.tensor([[0.6, 0.8], [1.0, 0]])
    plan = merge(rows.tolist(), [1])
    torch.testing.assert_close(apply(plan, rows)[0], torch.tensor([0.839475, 0.321050]), atol=1e-6, rtol=0)
    values = torch.tensor([[0, 4.0], [2.0, 0]])
    torch.testing.assert_close(apply(plan, values)[0], torch.tensor([1.197375, 1.605249]), atol=2e-6, rtol=0)


def test_two_into_one() -> None:
    """10.13, with the corrected Eq. 12."""
    rows = torch.tensor([[1.0, 0], [0.6, 0.8], [0.8, 0.6]])
    kept = mask_of(3, [0])
    plan = merge_plan(kept, ~kept, rows[None, None, :, 0], torch.zeros(1, 1, 3, dtype=torch.int32))  # both are merged
    assert plan.weights.tolist() == pytest.approx([0.401760, 0.269307, 0.328933], abs=1e-6)
    torch.testing.assert_close(apply(plan, rows)[0], torch.tensor([0.826490, 0.412806]), atol=1e-6, rtol=0)


def test_cosine_ignores_the_length_of_keys() -> None:
    """10.21; a zero key has cosine 0 with everything, not NaN."""
    keys = [unit(0.9), unit(0.5), unit(0.7), [1.0, 0]]
    base = merge(keys, [3])
    scaled = [[0.5 * x for x in unit(0.9)], [7 * x for x in unit(0.5)], unit(0.7), [3.0, 0]]
    other = merge(scaled, [3])
    assert sources(other) == [pytest.approx(entry) for entry in sources(base)]
    assert threshold(scaled, [3]) == pytest.approx(threshold(keys, [3]))
    zero = merge([[0.0, 0.0], [1.0, 0]], [1])
    assert bool(zero.weights.isfinite().all())


def test_values_follow_keys(random_prompt: Run) -> None:
    """10.17: values change nothing."""
    prompt = random_prompt()
    first = prompt.run(build_policy("d2o", {}), 9 * 20).merge
    prompt.values = [value.flip(0) for value in prompt.values]
    second = prompt.run(build_policy("d2o", {}), 9 * 20).merge
    assert all(torch.equal(getattr(first, f), getattr(second, f)) for f in ("indptr", "indices", "weights"))


def plain_merge(prompt: Any, decision: Decision, layer: int, head: int) -> dict[int, dict[int, float]]:
    """D2O of one head in plain Python: threshold, and sources of every kept token."""
    lens = decision.selection.keep_lens.flatten().tolist()
    run = layer * 3 + head
    kept = decision.selection.indices.split(lens)[run].tolist()
    keys = prompt.keys[layer][: prompt.end, head].double()
    keys = keys / keys.norm(dim=-1, keepdim=True)
    found = {}
    for token in sorted(set(range(prompt.end)) - set(kept)):
        allowed = [k for k in kept if k > token]
        if allowed:
            similarity = [float(keys[token] @ keys[k]) for k in allowed]
            best = max(range(len(allowed)), key=lambda i, s=similarity: (s[i], -i))
            found[token] = (similarity[best], allowed[best])
    threshold = sum(u for u, _ in found.values()) / len(found)
    raw = {k: {k: math.e} for k in kept}
    for token, (similarity, target) in found.items():
        if similarity >= threshold - 1e-6:
            raw[target][token] = math.exp(similarity)
    return {k: {t: w / sum(entry.values()) for t, w in entry.items()} for k, entry in raw.items()}


def test_equals_a_plain_oracle(random_prompt: Run, kept: Run) -> None:
    prompt = random_prompt(7)
    decision = prompt.run(build_policy("d2o", {}), 9 * 24, protected=4)
    runs = kept(decision)
    entries = iter(sources(decision.merge))
    bounds = decision.merge.indptr.tolist()
    assert len(bounds) == 9 * 24 + 1
    for layer in range(3):
        for head in range(3):
            expected = plain_merge(prompt, decision, layer, head)
            for token in runs[layer][head]:
                entry = next(entries)
                assert entry == pytest.approx(expected[token], abs=1e-5)
                assert next(iter(entry)) == token and list(entry)[1:] == sorted(list(entry)[1:])
                assert max(entry) == token
    flat = [(layer, head) for layer in range(3) for head in range(3) for _ in runs[layer][head]]
    owners = [flat[e] for e in range(len(flat)) for _ in range(bounds[e + 1] - bounds[e])]
    assert owners == list(zip(decision.merge.layers.tolist(), decision.merge.heads.tolist(), strict=True))


def test_sizes_sinks_and_recent(random_prompt: Run, kept: Run) -> None:
    """10.16: S_l per head in every layer, sinks and the last M always there."""
    decision = random_prompt().run(build_policy("d2o", {}), 9 * 24)
    lens = decision.selection.keep_lens
    assert bool((lens == lens[:, :1]).all()) and int(lens.sum()) == 9 * 24
    for layer in kept(decision):
        for run in layer:
            recent = (len(run) - 4) // 4
            assert run[:4] == [0, 1, 2, 3] and run[len(run) - recent :] == list(range(72 - recent, 72))


def test_ablations_equal_h2o_with_sinks(random_prompt: Run) -> None:
    """10.22: uniform layers keep what H2O keeps with the same ratio."""
    d2o = build_policy("d2o", {"budget_rule": "uniform", "num_sink_tokens": 0})
    h2o = build_policy("h2o", {"recent_ratio": 0.25})
    prompt = random_prompt()
    first, second = (prompt.run(policy, 9 * 24, protected=4).selection for policy in (d2o, h2o))
    assert torch.equal(first.indices, second.indices)


def test_unequal_heads_merge_too(random_prompt: Run, kept: Run) -> None:
    decision = random_prompt().run(build_policy("d2o", {"budget_rule": "adaptive-density"}), 9 * 20)
    assert len(decision.merge.indptr) == 9 * 20 + 1
    sums = torch.segment_reduce(decision.merge.weights, "sum", offsets=decision.merge.indptr.long())
    torch.testing.assert_close(sums, torch.ones(180))


def test_blocks_do_not_change_the_match(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(8)
    rows = torch.randn(2, 50, 4, generator=generator)
    kept = torch.rand(2, 50, generator=generator) < 0.3
    kept[0, :20] = False
    width = int(kept.sum(-1).max())
    whole = nearest_kept(rows, kept, width)
    monkeypatch.setattr("sgl_kvevict.policies.methods.d2o._BLOCK_ELEMENTS", 7 * 2 * width)
    blocked = nearest_kept(rows, kept, width)
    torch.testing.assert_close(blocked[0], whole[0])
    found = whole[0].isfinite()
    assert torch.equal(blocked[1][found], whole[1][found])


def test_equal_similarities_go_to_the_lower_position() -> None:
    """A11."""
    plan = merge([[0.6, 0.8], [1.0, 0], [1.0, 0], [1.0, 0]], [1, 2, 3])
    assert [sorted(entry) for entry in sources(plan)] == [[0, 1], [2], [3]]
