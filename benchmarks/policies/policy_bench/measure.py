"""Times and memory of one policy on one prompt."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from policy_bench.prompt import CLOCK, PrefilledPrompt
from sgl_kvevict.distill.features import CachedRange
from sgl_kvevict.distill.weights import with_learned_scores
from sgl_kvevict.policies import LayerView, Signal, build_policy
from sgl_kvevict.policies.layer_view import Show
from sgl_kvevict.ragged import MergePlan
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.prompt_observation import ObservationSpec, PromptObservation
from sgl_kvevict.segments.sources import Source, TokenRange

TAIL_TOKENS = 32
SINK_TOKENS = 4


@dataclass(frozen=True)
class Cost:
    """What one policy costs on one prompt; seconds are CPU time, see :data:`CLOCK`.

    Attributes:
        policy: name and options that are not the defaults.
        tokens: length of the prompt.
        prefill_s: its prefill without any policy.
        signals_s: what the forward pass does in addition.
        decide_s: scores, budgets, selection and merge plan.
        compact_s: moving the kept rows.
        kept_bytes: signals that stay until the compression.
        peak_bytes: most memory in use at a time, beyond the model, the pool and the forward pass, signals included.
        kv_bytes: the prompt's uncompressed KV.
    """

    policy: str
    tokens: int
    prefill_s: float
    signals_s: float
    decide_s: float
    compact_s: float
    kept_bytes: int
    peak_bytes: int
    kv_bytes: int

    @property
    def seconds(self) -> float:
        """All steps."""
        return self.signals_s + self.decide_s + self.compact_s

    @property
    def time_share(self) -> float:
        """All steps, as a share of the prefill."""
        return self.seconds / self.prefill_s

    @property
    def memory_share(self) -> float:
        """Peak as a share of the prompt's KV."""
        return self.peak_bytes / self.kv_bytes


class PolicyRun:
    """One policy on one prompt, step by step, on a copy of the pool.

    Args:
        prompt: what to compress.
        name: of the policy.
        options: of the policy.
        budget: share to keep.
    """

    def __init__(self, prompt: PrefilledPrompt, name: str, options: dict[str, Any], budget: float) -> None:
        policy = build_policy(name, options)
        assert policy is not None
        self.prompt, self.policy = prompt, policy
        self.label = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        self.spec = ObservationSpec(prompt.geometry, policy.needs, policy.scorer.window_size)
        self.token_slots = prompt.token_slots[: prompt.num_tokens - TAIL_TOKENS]
        self.num_slots = -(-int(budget * 1000) * self.token_slots.numel() // 1000)

    def observe(self) -> PromptObservation:
        """What the forward pass adds."""
        return self.prompt.observe(self.spec)

    def decide(self, observation: PromptObservation) -> tuple[Source, MergePlan | None]:
        """The entries that are kept, as the server chooses them, and how others are merged into them."""
        prompt = self.prompt

        def show_left(layer: int) -> LayerView:
            return observation.show(layer, 0, prompt.k_arena[layer], prompt.v_arena[layer], self.token_slots)

        show: Show = show_left
        if Signal.LEARNED_SCORES in self.policy.needs:
            if prompt.score_weights is None:
                raise FileNotFoundError("no learned scores of this model: a server ('sgl-kvevict serve') learns them")
            tokens = CachedRange(prompt.k_arena, prompt.v_arena, self.token_slots, 0, self.token_slots.numel())
            show = with_learned_scores(show_left, prompt.score_weights, tokens, prompt.rotary)
        total = self.num_slots * prompt.geometry.num_runs
        order = self.policy.order(show, prompt.geometry, total, SINK_TOKENS)
        source = Source(prompt.geometry, TokenRange(self.token_slots, 0, order.keys)).best(self.num_slots)
        merger, kept = self.policy.merger, source.mask
        views = [show(layer) for layer in range(prompt.geometry.num_layers)]
        return source, None if merger is None or kept is None else merger.merge(views, kept)

    def compact(self, source: Source, merge: MergePlan | None, store: SegmentPacker) -> None:
        """Move rows."""
        store.rewrite(source, source.fewest_slots, merge=merge)

    def copied_store(self) -> SegmentPacker:
        """A pool to write to; the prompt's own stays as it is."""
        return SegmentPacker(self.prompt.geometry, self.prompt.k_arena.clone(), self.prompt.v_arena.clone())


@torch.inference_mode()
def measure(run: PolicyRun, prefill_s: float, repeats: int) -> Cost:
    """Fastest of several rounds, and the memory of one more."""
    times = []
    store = run.copied_store()
    for _ in range(repeats):
        clock = [CLOCK()]
        observation = run.observe()
        clock.append(CLOCK())
        decision = run.decide(observation)
        clock.append(CLOCK())
        run.compact(*decision, store)
        clock.append(CLOCK())
        times.append([after - before for before, after in itertools.pairwise(clock)])
    signals, decide, compact = (min(column) for column in zip(*times, strict=True))
    kept, peak = measure_memory(run, store)
    return Cost(run.label, run.prompt.num_tokens, prefill_s, signals, decide, compact, kept, peak, run.prompt.kv_bytes)


def measure_memory(run: PolicyRun, store: SegmentPacker) -> tuple[int, int]:
    """Bytes that stay between forward pass and compression, and the peak of both."""
    held: list[Any] = []
    kept, peak_forward = allocations(lambda: held.append(run.observe()))
    _, peak_after = allocations(lambda: run.compact(*run.decide(held[0]), store))
    return kept, max(peak_forward, kept + peak_after)


def allocations(action: Callable[[], object]) -> tuple[int, int]:
    """Bytes allocated and not freed by an action, and the most that were in use at a time, by torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return now, peak
