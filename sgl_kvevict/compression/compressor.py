"""Compresses ranges of uncompressed tokens into segments: score, select, pack."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.compression.prompt_observation import CacheObservation, ObservationSpec, PromptObservation
from sgl_kvevict.compression.reader_observation import ReaderObservation
from sgl_kvevict.compression.sliding_windows import order_beside_windows
from sgl_kvevict.compression.streams import ChoiceStream
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.distill import CachedRange, LearnedScores, ScoredText, with_learned_scores
from sgl_kvevict.policies.layer_view import Show
from sgl_kvevict.policies.order import measured_order, scores_of
from sgl_kvevict.policies.parts import Decision, PolicyState
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import joint_attention
from sgl_kvevict.prefix import Segment, SegmentPacker, Sources, TokenRange

Observation = PromptObservation | ReaderObservation | CacheObservation
"""Signals of a range that is to be compressed."""


@dataclass(frozen=True)
class Compression:
    """Result of one compression.

    Attributes:
        freed: [num_freed], int64, slots to release; the segment has the first of the range's slots.
        merged_entries: entries merged into stored ones.
        seconds: host time (on a GPU: launching only).
        replaced: previous segment of the range's first tokens, if they were compressed already.
    """

    segment: Segment
    freed: Tensor
    merged_entries: int
    seconds: float
    replaced: Segment | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens compressed for the first time."""
        return self.segment.num_tokens - (0 if self.replaced is None else self.replaced.num_tokens)

    @property
    def new_entries(self) -> int:
        """Stored entries minus those of the replaced segment."""
        return self.segment.num_entries - (0 if self.replaced is None else self.replaced.num_entries)


@dataclass(frozen=True)
class Chosen:
    """Entries to keep of the range from ``start`` on, before any row is moved; other attributes as in the segment.

    ``seconds``: host time.
    """

    start: int
    decision: Decision
    splittable: bool
    is_measured: bool
    seconds: float


def state_of(parent: Segment | None) -> Callable[[], object]:
    """The policy state that a range begins with, after the segment right before it on its path."""
    state = None if parent is None else parent.policy_state
    return lambda: state


@dataclass(eq=False)
class Compressor:
    """Applies one policy and one budget to ranges of the arena.

    ``rotary`` and ``output_grams`` are as in :class:`ObservationSpec`; ``learned`` is for ``distilled``;
    ``slot_positions`` as in :class:`CachedRange`; entries are chosen on ``stream`` (None: at once, on the
    scheduler's).
    """

    config: KVEvictConfig
    policy: Policy
    packer: SegmentPacker
    rotary: Rotary | None = None
    output_grams: Tensor | None = None
    learned: LearnedScores | None = None
    slot_positions: Tensor | None = None
    stream: ChoiceStream | None = None

    def __post_init__(self) -> None:
        policy, geometry = self.policy, self.packer.geometry
        self.observes = ObservationSpec(geometry, policy.needs, policy.window_size, self.rotary, self.output_grams)

    @property
    def scores_any_range(self) -> bool:
        """Whether any range can be scored from the cache alone, by learned scores."""
        return self.learned is not None

    @property
    def splittable(self) -> bool:
        """Whether every segment may be split at any token."""
        return self.policy.splittable and not self.packer.geometry.has_windows

    @property
    def compresses_at_once(self) -> bool:
        """Whether a prompt is compressed when it is complete, without waiting for scoring passes."""
        return not self.policy.needs_passes or (self.scores_any_range and not self.config.wait_for_passes)

    @property
    def stored_tail(self) -> int:
        """Uncompressed tokens that a store keeps behind a prefix; none if positions of their keys would be missing."""
        return self.config.tail_tokens if self.slot_positions is None else 0

    def new_observation(self) -> PromptObservation:
        """An empty observation of the signals that the policy needs."""
        return PromptObservation(self.observes)

    def new_reader_observation(
        self, start: int, end: int, reach: int = 0, segments: Sequence[Segment] = ()
    ) -> ReaderObservation:
        """An empty observation of ``[start, end)`` and of the entries of ``segments``."""
        return ReaderObservation(self.packer.geometry, start, end, reach, segments, self.packer.k_arena)

    def rank_by_attention(self, segment: Segment) -> None:
        """Order a segment's entries by reader attention, and its prediction if there are learned scores."""
        assert segment.order is not None and segment.entry_attention is not None
        scores = segment.entry_attention.squares.sqrt()
        if self.scores_any_range:
            scores = joint_attention(scores, scores_of(segment.order))
        segment.order = measured_order(segment.order, scores)
        segment.is_measured, segment.entry_attention = True, None

    def scored_text(self, token_slots: Tensor, readers: ReaderObservation, prompt: PromptObservation) -> ScoredText:
        """What scores are learned from: the first tokens of a text that passes (``readers``) have read to its end.

        ``token_slots``: [num_tokens], int64; ``prompt`` has the text's last queries.
        """
        show = self._show(prompt, readers.start, token_slots)
        tokens = self._cached(token_slots, readers.start)
        return ScoredText(tokens, readers.scores(token_slots.numel()), show)

    def _cached(self, token_slots: Tensor, start: int) -> CachedRange:
        packer, end = self.packer, start + token_slots.numel()
        return CachedRange(
            packer.k_arena,
            packer.v_arena,
            token_slots,
            start,
            end,
            packer.geometry.scales,
            slot_positions=self.slot_positions,
        )

    def _show(self, observation: Observation, start: int, token_slots: Tensor) -> Show:
        k_arena, v_arena = self.packer.k_arena, self.packer.v_arena
        return lambda layer: observation.show(layer, start, k_arena[layer], v_arena[layer], token_slots)

    def compress(
        self,
        token_slots: Tensor,
        start: int,
        observation: Observation,
        parent: Segment | None = None,
        share: float | None = None,
    ) -> Compression:
        """Write the segment of one range now: :meth:`choose`, then :meth:`write`.

        ``parent``, the segment right before the range on its path, gives the policy state.
        """
        chosen = self.choose(token_slots, start, observation, state_of(parent), share)
        return self.write(chosen(), token_slots)

    def choose(
        self,
        token_slots: Tensor,
        start: int,
        observation: Observation,
        state: Callable[[], object],
        share: float | None = None,
    ) -> Callable[[], Chosen]:
        """Launch scoring and selection of one range, without a host sync; nothing is moved.

        The caller owns ``token_slots``, [num_tokens], int64, in token order, until the result was called or is of no
        use. With learned scores, ``observation`` may lack other score signals. ``state`` gives the policy state of the
        range right before it on its path; ``share`` of the range replaces the budget.
        """

        def work() -> Chosen:
            return self._choose(token_slots, start, observation, state(), share)

        if self.stream is not None:
            return self.stream.launch(work)
        chosen = work()
        return lambda: chosen

    def write(self, chosen: Chosen, token_slots: Tensor) -> Compression:
        """Write the segment of the chosen entries into the first of its range's slots, without a host sync.

        Its number of slots follows from the budget.
        """
        begin = time.perf_counter()
        decision = chosen.decision
        order = decision.order if len(self.config.shares) > 1 else None  # else it never shrinks
        sources = Sources(self.packer.geometry, [TokenRange(token_slots, chosen.start, order)], decision.selection)
        segment, freed = self.packer.rewrite(sources, sources.fewest_slots, bits=16, merge=decision.merge)
        segment.policy_state = decision.state
        segment.splittable, segment.is_measured = chosen.splittable, chosen.is_measured
        merged = 0 if decision.merge is None else decision.merge.indices.numel() - segment.num_entries
        seconds = chosen.seconds + time.perf_counter() - begin
        return Compression(segment, freed, merged, seconds)

    def _choose(
        self, token_slots: Tensor, start: int, observation: Observation, state: object, share: float | None
    ) -> Chosen:
        begin = time.perf_counter()
        num_tokens = token_slots.numel()
        config = self.config
        num_slots = config.num_slots(num_tokens, start) if share is None else config.slots_at(share, num_tokens, start)
        geometry = self.packer.geometry
        show = self._show(observation, start, token_slots)
        is_measured = isinstance(observation, ReaderObservation)
        asks = isinstance(observation, ReaderObservation) and observation.reach > 0  # the questions are known
        learned = self.learned if num_slots < num_tokens and not asks else None
        if learned is not None:
            show = with_learned_scores(show, learned.weights, self._cached(token_slots, start), learned.rotary)
        assert state is None or isinstance(state, PolicyState)
        decision = Decision(Sources(geometry, [TokenRange(token_slots, start)]).selection, state=state)
        if num_slots < num_tokens:
            order = self._order(show, token_slots, start)
            selection = Sources(geometry, [TokenRange(token_slots, start, order)]).best(num_slots).selection
            decision = Decision(selection, *self.policy.merge(show, geometry, selection, state), order)
        is_cut = geometry.has_windows and num_slots < num_tokens
        splittable = self.policy.splittable and not is_cut
        return Chosen(start, decision, splittable, is_measured, time.perf_counter() - begin)

    def _order(self, show: Show, token_slots: Tensor, start: int) -> Tensor:
        """The order of a range in which those entries come first that the policy keeps at the budget."""
        geometry, num_slots = self.packer.geometry, self.config.num_slots(token_slots.numel(), start)
        protected = min(max(self.config.sink_tokens - start, 0), num_slots)
        total = num_slots * geometry.num_runs
        if geometry.has_windows:
            return order_beside_windows(self.policy, show, geometry, token_slots, total, protected)
        return self.policy.order(show, geometry, total, protected)

    def state(self) -> dict[str, Any]:
        """Policy, budget, and learned scores, as plain values."""
        state: dict[str, Any] = {"policy": self.policy.name, "budget": self.config.budget}
        return state if self.learned is None else state | {"learned_scores": self.learned.state()}
