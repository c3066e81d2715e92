"""Compresses a range of uncompressed tokens into a segment, as configured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.compression.attention_products import AttentionProducts
from sgl_kvevict.compression.learned import with_learned_scores
from sgl_kvevict.compression.pending_fit import PendingFit
from sgl_kvevict.compression.prompt_observation import CacheObservation, ObservationSpec, PromptObservation
from sgl_kvevict.compression.reader_observation import ReaderObservation
from sgl_kvevict.compression.sliding_windows import select_beside_windows
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.distill import CachedRange, Lesson, ScoreLearner
from sgl_kvevict.policies.layer_view import LayerView, Show
from sgl_kvevict.policies.parts import PolicyState
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.policies.worth import worth_of_read
from sgl_kvevict.prefix import Segment, SpanStore

Observation = PromptObservation | ReaderObservation | CacheObservation
"""What is known of a range that is to be compressed."""


@dataclass
class FitStats:
    """Counters of fits since the server started.

    Attributes:
        fits: segments that were fitted.
        fits_given_up: segments that stayed as they were selected: no memory, an error, or they were dropped.
        fit_seconds: host time spent on fits, without what passes did for them.
    """

    fits: int = 0
    fits_given_up: int = 0
    fit_seconds: float = 0.0


@dataclass(frozen=True)
class Compression:
    """One compression that was done.

    Attributes:
        segment: what was written, in the first of the range's slots.
        freed: [num_freed], int64, slots of the range that are free now.
        start: logical position of the range's first token.
        num_tokens: length of the range.
        merged_entries: entries folded into stored ones; those neither stored nor merged are evicted.
        seconds: host time spent (on a GPU: launching only).
        fit: what is to be fitted to what the segment does not keep; None: nothing.
        replaced: what its first tokens were stored in before, if they were compressed already.
    """

    segment: Segment
    freed: Tensor
    start: int
    num_tokens: int
    merged_entries: int
    seconds: float
    fit: PendingFit | None = None
    replaced: Segment | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens that were uncompressed before."""
        return self.num_tokens - (0 if self.replaced is None else self.replaced.end - self.replaced.start)

    @property
    def new_entries(self) -> int:
        """Entries stored, less those that were stored before."""
        return self.segment.num_entries - (0 if self.replaced is None else self.replaced.num_entries)


class Compressor:
    """Applies one policy and one budget to ranges of the arena.

    Args:
        config: budget and protected tokens.
        policy: what to keep.
        store: where segments are written.
        rotary: the model's rotary embedding; needed by policies that turn queries.
        output_grams: of each layer's output projection, see :attr:`ObservationSpec.output_grams`; needed by policies
            that weigh values.
        learner: holds learned scores, or learns them; needed by the policy ``distilled``.

    Attributes:
        is_short: token slots have been short: what has to do for learned scores, as long as there are none, is worth
            its time in the prefill.
    """

    def __init__(
        self,
        config: KVEvictConfig,
        policy: Policy,
        store: SpanStore,
        rotary: Rotary | None = None,
        output_grams: Tensor | None = None,
        learner: ScoreLearner | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.store = store
        self.observes = ObservationSpec(store.geometry, policy.needs, policy.window_size, rotary, output_grams)
        self.learner = learner
        self.is_short = False
        self.stats = FitStats()

    @property
    def has_learned(self) -> bool:
        """Any range can be scored at any time, from the cache alone."""
        return self.learner is not None and self.learner.weights is not None

    @property
    def splittable(self) -> bool:
        """Every segment may be cut at any token."""
        return self.policy.splittable and not self.store.geometry.has_windows

    @property
    def compresses_at_once(self) -> bool:
        """A prompt is compressed as soon as it is complete: no readers are needed, or none are waited for."""
        return self.policy.readers is None or (self.has_learned and not self.config.wait_for_passes)

    def new_observation(self) -> PromptObservation:
        """Return an empty observation of the kind the policy needs now."""
        spec = self.observes
        if Signal.LEARNED_SCORES in spec.signals and (self.has_learned or not self.is_short):
            spec = replace(spec, signals=spec.signals - {Signal.ECHO_ATTENTION})
        return PromptObservation(spec)

    def new_reader_observation(
        self, start: int, end: int, reach: int = 0, segments: Sequence[Segment] = ()
    ) -> ReaderObservation:
        """Return an empty :class:`ReaderObservation` of what readers pay ``[start, end)``, and entries of segments."""
        fitter, store, config = self.policy.fitter, self.store, self.config
        products = None
        is_long = end - config.tail_tokens - start >= config.min_prefix_tokens
        if fitter is not None and is_long and not reach and (isinstance(config.budget, int) or config.budget < 1):
            block = fitter.block_len(end - start)
            products = AttentionProducts(store.geometry, start, end - start, block, store.v_arena.element_size())
        return ReaderObservation(store.geometry, start, end, reach, segments, store.k_arena, products)

    def was_read(self, segment: Segment) -> None:
        """The readers of a segment's entries have come: from now on their attention says what it gives up first."""
        assert segment.worth is not None and segment.readings is not None
        segment.worth = worth_of_read(segment.worth, segment.readings.squares.sqrt())
        segment.is_read, segment.readings = True, None

    def lesson(self, token_slots: Tensor, readers: ReaderObservation, prompt: PromptObservation) -> Lesson | None:
        """Begin to learn from a range that was read to its end; None if there is nothing to learn (any more).

        Args:
            token_slots: [num_tokens], int64, slots of its first tokens; they must not change until the lesson ends.
            readers: what they attended to.
            prompt: what the prefill of a prompt left behind that goes on behind the range.
        """
        store = self.store
        if self.learner is None or self.learner.weights is not None or not store.geometry.full_layers:
            return None
        scales = store.geometry.scales
        end = readers.start + token_slots.numel()
        tokens = CachedRange(store.k_arena, store.v_arena, token_slots, readers.start, end, scales)

        def show(layer: int) -> LayerView:
            return prompt.show(layer, readers.start, store.k_arena[layer], store.v_arena[layer], token_slots)

        return self.learner.lesson(tokens, readers.scores(token_slots.numel()), show)

    def compress(
        self,
        token_slots: Tensor,
        start: int,
        observation: Observation,
        parent: Segment | None = None,
        share: float | None = None,
    ) -> Compression:
        """Write the segment of one range.

        The number of slots follows from the budget alone, so nothing is read from the device.

        Args:
            token_slots: [num_tokens], int64, slots of the range in token order, all owned by the caller.
            start: logical position of the range's first token.
            observation: what the prefill, or the range's readers, left behind; with learned scores nothing is needed.
            parent: segment of the path right before the range; its policy state carries on.
            share: of the range to keep; None: what the budget says.
        """
        begin = time.perf_counter()
        num_tokens = token_slots.numel()
        config = self.config
        num_slots = config.num_slots(num_tokens, start) if share is None else config.slots_at(share, num_tokens)
        geometry = self.store.geometry

        def show_left(layer: int) -> LayerView:
            return observation.show(layer, start, self.store.k_arena[layer], self.store.v_arena[layer], token_slots)

        show: Show = show_left
        learner = self.learner if num_slots < num_tokens and not isinstance(observation, ReaderObservation) else None
        if learner is not None and learner.weights is not None:
            end, scales = start + num_tokens, geometry.scales
            tokens = CachedRange(self.store.k_arena, self.store.v_arena, token_slots, start, end, scales)
            show = with_learned_scores(show_left, learner.weights, tokens, learner.rotary)
        fit = self._fit(token_slots, start, observation) if num_slots < num_tokens else None
        protected = min(max(config.sink_tokens - start, 0), num_slots)
        state = None if parent is None else parent.policy_state
        assert state is None or isinstance(state, PolicyState)
        total, with_worth = num_slots * geometry.num_runs, len(config.shares) > 1
        is_cut = geometry.has_windows and num_slots < num_tokens
        if is_cut:
            decision = select_beside_windows(
                self.policy,
                show,
                geometry,
                num_tokens,
                total,
                protected,
                with_worth=with_worth,
                device=token_slots.device,
            )
        else:
            decision = self.policy.select(show, geometry, total, protected, state, with_worth=with_worth)
        segment, freed = self.store.pack(
            token_slots,
            start,
            decision.selection,
            merge=decision.merge,
            splittable=self.policy.splittable and not is_cut,
            worth=decision.worth,
        )
        segment.policy_state = decision.state
        segment.is_read = isinstance(observation, ReaderObservation)
        merged = 0 if decision.merge is None else decision.merge.indices.numel() - segment.num_entries
        return Compression(segment, freed, start, num_tokens, merged, time.perf_counter() - begin, fit)

    def _fit(self, token_slots: Tensor, start: int, observation: Observation) -> PendingFit | None:
        """What the fit of a range that is about to be compressed needs; None: it has none, or nobody read the range."""
        products = observation.products if isinstance(observation, ReaderObservation) else None
        if self.policy.fitter is None or products is None or products.start != start:
            return None
        return PendingFit(self.policy.fitter, products, self.store.token_values(token_slots), start)

    def state(self) -> dict[str, Any]:
        """Return policy, budget, and counters of fits and of learning, in plain values."""
        state: dict[str, Any] = {"policy": self.policy.name, "budget": self.config.budget}
        if self.policy.fitter is not None:
            stats = self.stats
            state |= {"fits": stats.fits, "fits_given_up": stats.fits_given_up, "fit_seconds": stats.fit_seconds}
        return state if self.learner is None else state | {"learned_scores": self.learner.state()}
