"""What every policy guarantees, whatever it is composed of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.decisions import OWN_POLICIES, built, decide
from helpers.packing import Selection
from kvevict_kernels.radix_select import largest_entries
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies import LayerView, Policy, Signal, build_policy, list_policies
from sgl_kvevict.policies.options import RULES
from sgl_kvevict.policies.order import PINNED
from sgl_kvevict.policies.parts import RangeScores
from sgl_kvevict.policies.selectors import TopKSelector

NAMES = [*(info.name for info in list_policies() if info.name != "none"), *OWN_POLICIES]
WITH_WINDOW = ("snapkv", "pyramidkv", "ada-snapkv", "ada-pyramidkv", "chunkkv")
WINDOWS = {"k-vec": {"base_window": 4, "extended_window": 8}, **{name: {"window_size": 8} for name in WITH_WINDOW}}


def combinations() -> list[tuple[str, str]]:
    found = []
    for name in NAMES:
        for rule in RULES:
            try:
                build_policy(OWN_POLICIES.get(name, name), {"budget_rule": rule})
            except ConfigError:
                continue
            found.append((name, rule))
    return found


def build(name: str, **options: Any) -> Policy:
    return built(OWN_POLICIES.get(name, name), **WINDOWS.get(name, {}) | options)


def test_what_combines_and_what_is_refused():
    combined = combinations()
    rules = {name: {rule for other, rule in combined if other == name} for name in NAMES}
    density = {"density", "adaptive-density"}
    everything = set(RULES)
    expected = dict.fromkeys(NAMES, everything - density)
    expected["h2o"] = expected["d2o"] = everything
    expected["streaming-llm"] = expected["knorm"] = {"uniform", "pyramid"}
    assert rules == expected


VARIANTS = [
    ("chunkkv", {"reuse_layers": 3}),
    ("chunkkv", {"reuse_layers": 2, "chunk_length": 4}),
    ("chunkkv", {"chunk_score": "mean", "share_heads": True}),
    ("h2o", {"normalize": "queries", "recent_ratio": 0.3}),
    ("k-vec", {"protected_share": 0.5, "bonus": 3.0}),
    ("snapkv", {"kernel_size": 1, "keep_window": False}),
    ("ada-snapkv", {"safeguard": "kvpress", "alpha": 0.4}),
    ("value_aware:value_aware", {}),
]
"""Options that change the parts of a policy; the last one is served by its dotted path."""


def policies() -> list[tuple[str, dict[str, Any]]]:
    return [(name, {"budget_rule": rule}) for name, rule in combinations()] + VARIANTS


def choice_of_parts(policy: Policy, prompt: Any, total: int, protected: int) -> torch.Tensor:
    """[L, H, N] bool: what scorer, budget rule and selector keep, which are what the papers describe."""
    geometry = prompt.geometry
    views = [prompt.show(layer) for layer in range(0, geometry.num_layers, policy.reuse_layers)]
    scores = policy._score(views, total // geometry.num_runs, protected)
    net = total - geometry.num_runs * scores.num_pinned
    if policy.reuse_layers > 1:
        net = net // geometry.num_layers * len(views)
    kept = policy.selector.select(scores, policy.allocator.allocate(scores, net))
    return kept.repeat_interleave(policy.reuse_layers, dim=0)[: geometry.num_layers]


def mask_of(selection: Selection, num_tokens: int) -> torch.Tensor:
    lens = selection.keep_lens.flatten().long()
    mask = torch.zeros(len(lens), num_tokens, dtype=torch.bool)
    mask[torch.repeat_interleave(lens), selection.indices.long()] = True
    return mask.view(*selection.keep_lens.shape, num_tokens)


def best(order: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` entries in order, by a plain sort; among equal ones the lower run, then position."""
    first = order.flatten().sort(descending=True, stable=True).indices[:count]
    return torch.zeros(order.numel(), dtype=torch.bool).index_fill_(0, first, True).view_as(order)


@pytest.mark.parametrize(("name", "options"), policies(), ids=str)
@pytest.mark.parametrize(("tail", "has_ties"), [(8, False), (0, False), (3, True)])
def test_one_order_has_the_choice_at_the_budget_and_all_others_around_it(
    random_prompt, name, options, tail, *, has_ties
):
    """At its budget exactly what the parts keep; fewer entries are a part of it, more contain it, and so do they."""
    prompt, num_tokens = random_prompt(length=60, tail=tail), 60 - tail
    if has_ties:  # every token three times, and all values alike
        prompt.keys = [keys[torch.arange(60) // 3 * 3] for keys in prompt.keys]
        prompt.queries = [queries.round() for queries in prompt.queries]
    policy = build(name, **options)
    for slots, protected in ((3, 3), (4, 3), (13, 4), (29, 0), (num_tokens - 1, 2)):
        total = slots * 9
        kept = choice_of_parts(policy, prompt, total, protected)
        order = policy.order(prompt.show, prompt.geometry, total, protected).keys
        assert order.dtype == torch.int16 and order.shape == kept.shape
        assert torch.equal(order >= 0, kept) and torch.equal(best(order, total), kept)
        decision = prompt.run(policy, total, protected)
        assert torch.equal(mask_of(decision.selection, num_tokens), kept)
        assert torch.equal(decision.order, order)
        pinned = order == PINNED
        assert pinned[..., :protected].all()
        larger = torch.ones_like(kept)
        most = 9 * num_tokens
        for count in sorted({most, min(total + 40, most), total, total - 25, 9 * protected, 5}, reverse=True):
            numbers, lens = largest_entries(order.flatten(), torch.arange(10) * num_tokens, count)
            chosen = mask_of(Selection(lens.view(3, 3), (numbers % num_tokens).int(), count), num_tokens)
            assert torch.equal(chosen, best(order, count)) and not (chosen & ~larger).any()
            assert count < pinned.sum() or chosen[pinned].all()
            larger = chosen


def test_a_range_that_is_kept_whole_can_be_ordered(random_prompt):
    """Every entry is kept at the budget; it is the order in which they would go."""
    prompt = random_prompt(length=60)
    for name in NAMES:
        order = build(name).order(prompt.show, prompt.geometry, 52 * 9, 2).keys
        assert order.ge(0).all() and order[..., :2].eq(PINNED).all() and order.unique().numel() > 10


def test_a_selector_that_keeps_another_number_is_an_error(random_prompt):
    class Greedy(TopKSelector):
        def select(self, scores: RangeScores, keep_lens: torch.Tensor) -> torch.Tensor:
            return super().select(scores, keep_lens + 1)

    policy = replace(build("knorm"), selector=Greedy())
    prompt = random_prompt(length=60)
    with pytest.raises(ValueError, match=r"'knorm' kept 189 entries of a range of \(3, 3, 52\) .* instead of 180"):
        policy.order(prompt.show, prompt.geometry, 180, 0).check()


@pytest.mark.parametrize(
    ("dtype", "k_scale", "v_scale"),
    [(torch.float8_e4m3fn, 0.5, 2.0), (torch.bfloat16, 1.0, 1.0)],
    ids=["float8", "bf16"],
)
@pytest.mark.parametrize("name", NAMES)
def test_stored_keys_and_values_count_as_what_they_stand_for(random_prompt, kept, name, dtype, k_scale, v_scale):
    """The same choice from rows stored in few bits, with scales, and queries of 16 bits, as from the numbers."""
    prompt = random_prompt(length=60)
    stored = [[(4 * x).to(dtype) for x in rows] for rows in (prompt.keys, prompt.values)]
    prompt.keys = [k_scale * x.float() for x in stored[0]]
    prompt.values = [v_scale * x.float() for x in stored[1]]
    prompt.queries = [x.bfloat16().float() for x in prompt.queries]

    def as_stored(layer: int) -> LayerView:
        buffers = torch.zeros(2, prompt.length + 1, prompt.num_heads, prompt.head_dim, dtype=dtype)
        buffers[0, prompt.slots], buffers[1, prompt.slots] = stored[0][layer], stored[1][layer]
        seen = prompt.show(layer)
        window = replace(seen.need_window(), queries=seen.need_window().queries.bfloat16())
        seen = replace(seen, k_buffer=buffers[0], v_buffer=buffers[1], k_scale=k_scale, v_scale=v_scale)
        return seen.with_signals({Signal.WINDOW_QUERIES: window})

    want, got = (decide(build(name), show, prompt.geometry, 17 * 9, 2) for show in (prompt.show, as_stored))
    assert kept(got) == kept(want)
    assert got.merge is None or got.merge.weights.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_larger_budgets_keep_more_of_the_same(random_prompt, kept, name):
    """Not a law for merging or coverage, whose choices depend on the budget; sizes grow for all."""
    prompt = random_prompt(length=60)
    small, large = (prompt.run(build(name), 9 * n, 2) for n in (12, 30))
    assert bool((large.selection.keep_lens >= small.selection.keep_lens).all())
    if name in ("snapkv", "knorm", "keydiff", "random", "streaming-llm", "chunkkv"):
        pairs = zip(kept(small), kept(large), strict=True)
        assert all(set(a) <= set(b) for fewer, more in pairs for a, b in zip(fewer, more, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_only_declared_signals_are_read(random_prompt, name):
    policy = build(name)
    prompt = random_prompt(length=60)

    def stripped(layer: int) -> LayerView:
        seen = prompt.show(layer)
        poison = torch.full_like(seen.k_buffer, torch.nan)
        return replace(
            seen,
            signals={signal: value for signal, value in seen.signals.items() if signal in policy.needs},
            k_buffer=seen.k_buffer if Signal.KEYS in policy.needs else poison,
            v_buffer=seen.v_buffer if Signal.VALUES in policy.needs else poison,
        )

    full = prompt.run(policy, 9 * 20, 2)
    assert prompt.shown == [0, 1, 2]  # all layers, in ascending order
    bare = decide(policy, stripped, prompt.geometry, 9 * 20, 2)
    assert torch.equal(full.selection.indices, bare.selection.indices)
    assert (policy.scorer.window_size > 0) == (Signal.WINDOW_QUERIES in policy.needs)


@pytest.mark.parametrize("name", NAMES)
def test_one_token_and_one_head(random_prompt, kept, name):
    prompt = random_prompt(num_layers=1, num_heads=1, group=6, length=9, tail=7)
    decision = prompt.run(build(name), 1)
    assert [len(run) for run in kept(decision)[0]] == [1]
    nothing = prompt.run(build(name), 0)
    assert nothing.selection.indices.numel() == 0
