"""Ranks the entries of ranges: scores them by one policy, for one budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.distill.features import CachedRange
from sgl_kvevict.distill.weights import LearnedScores, with_learned_scores
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.policies.layer_view import Show
from sgl_kvevict.policies.order import RangeOrder
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.ragged import MergePlan
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.prompt_observation import Observation, ObservationSpec
from sgl_kvevict.segments.segment import Order
from sgl_kvevict.segments.sliding_windows import order_beside_windows
from sgl_kvevict.segments.sources import Source
from sgl_kvevict.segments.streams import SideStream

END_OF_A_TEXT_THAT_GOES_ON = 2**40
"""Learned scores see where a token lies in its text. So far from the end all tokens lie at the beginning alike."""


@dataclass(eq=False)
class Compressor:
    """Applies one policy and one budget to ranges of the arena.

    Without a coding in ``packer``, rows have 16 bits, whatever ``config`` says. ``learned`` is for policy
    ``distilled``. ``slot_positions`` are as in :class:`CachedRange`. Entries are ranked on ``stream``; None: at once,
    on the scheduler's.
    """

    config: KVEvictConfig
    policy: Policy
    packer: SegmentPacker
    learned: LearnedScores | None = None
    slot_positions: Tensor | None = None
    stream: SideStream | None = None

    def __post_init__(self) -> None:
        policy, geometry = self.policy, self.packer.geometry
        if self.packer.coding is None:
            self.config = self.config.model_copy(update={"bits": 16})
        self.observes = ObservationSpec(geometry, policy.needs, policy.scorer.window_size)

    @property
    def scores_any_range(self) -> bool:
        """Whether any range can be scored from the cache alone, by learned scores."""
        return self.learned is not None

    @property
    def answer_block(self) -> int | None:
        """Tokens by which an answer grows until they are compressed; None: it stays as it is while it is generated."""
        config = self.config
        if config.answer_block is None or config.budget == 1 or not self.policy.compresses:
            return None
        return max(config.answer_block, config.min_prefix_tokens)

    @property
    def splittable(self) -> bool:
        """Whether every segment may be split at any token."""
        return not self.packer.geometry.has_windows

    def end_of(self, num_tokens: int) -> int:
        """Where the compressed tokens of a prompt end of which ``num_tokens`` are in the tree.

        If segments cannot be split, that is not its last token. The same prompt, asked again, matches all but this one,
        and a prompt with another end diverges in its last tokens, too.
        """
        return num_tokens if self.splittable else num_tokens - self.config.tail_tokens

    def tokens_kept(self, num_tokens: int, start: int, share: float | None = None) -> int:
        """Entries that a run keeps of a range at a share (None: the budget), on average.

        ``start``: where the range begins.
        """
        num_slots = self.config.num_slots(num_tokens, start, share)
        return sum(self.config.tokens_kept(num_slots, num_tokens, start).values())

    def cached(self, token_slots: Tensor, start: int) -> CachedRange:
        """Uncompressed tokens of the arena: ``token_slots``, [num_tokens], int64, from the position ``start`` on."""
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

    def show(self, observation: Observation, start: int, token_slots: Tensor) -> Show:
        """Views of what was observed of uncompressed tokens, arguments as in :meth:`rank`, layer by layer."""
        k_arena, v_arena = self.packer.k_arena, self.packer.v_arena
        return lambda layer: observation.show(layer, start, k_arena[layer], v_arena[layer], token_slots)

    def rank(
        self, token_slots: Tensor, start: int, observation: Observation, turn: int, share: float | None = None
    ) -> Order:
        """Launch the order of all entries of a range in place; on ``stream`` without a host sync.

        The best are what the policy keeps at a share (None: the budget).

        ValueError here, or where the keys of the order are used, if the policy's scores or choice are wrong.

        The caller owns ``token_slots``, [num_tokens], int64, in token order, until the keys were read or are of no use.
        With learned scores, ``observation`` may lack other score signals. ``turn``: see :class:`Order`.
        """
        goes_on = observation.goes_on  # read before the ranking, beside which the next chunk may be announced

        def work() -> RangeOrder:
            return self._order(token_slots, start, observation, share, goes_on=goes_on)

        end = start + token_slots.numel()
        if self.stream is not None:
            ranked = self.stream.launch(work)
            return Order(lambda: ranked().keys, start, end, turn, check=lambda: ranked().check())
        order = work()
        if order.keys.is_cuda:  # sync: only where no stream beside the scheduler's can rank
            torch.cuda.current_stream(order.keys.device).synchronize()
        order.check()
        return Order(lambda: order.keys, start, end)

    def merge(self, source: Source, observation: Observation) -> MergePlan | None:
        """How a range's other entries are merged into the kept ones, by a :class:`Merger`; None: they are not."""
        if self.policy.merger is None or (kept := source.mask) is None:
            return None
        show = self.show(observation, source.start, source.token_slots)
        return self.policy.merger.merge([show(layer) for layer in range(self.packer.geometry.num_layers)], kept)

    def protected(self, num_tokens: int, start: int) -> tuple[int, int]:
        """First and last tokens of a range that every head keeps at every share: sinks, and ``tail_tokens``.

        The last ones are at most half of what it keeps at the least share beside the sinks.
        """
        least = self.tokens_kept(num_tokens, start, self.config.shares[-1])
        num_first = min(max(self.config.sink_tokens - start, 0), least)
        # Half at most: a small segment would else keep the end of its prompt and nothing of the rest.
        return num_first, min(self.config.tail_tokens, (least - num_first) // 2)

    def _order(
        self, token_slots: Tensor, start: int, observation: Observation, share: float | None, *, goes_on: bool
    ) -> RangeOrder:
        """The order of a range; the entries that the policy keeps at the share are the best of it."""
        geometry = self.packer.geometry
        show = self.show(observation, start, token_slots)
        if self.learned is not None:
            weights, tokens = self.learned.weights, self.cached(token_slots, start)
            if weights is None:
                raise InvariantError("a range is to be scored before scores were learned")
            if goes_on:
                # Relative to the end of each block, scores of several could not be compared.
                tokens = replace(tokens, end=END_OF_A_TEXT_THAT_GOES_ON)
            show = with_learned_scores(show, weights, tokens, self.learned.rotary)
        num_tokens = token_slots.numel()
        total = self.tokens_kept(num_tokens, start, share) * geometry.num_runs
        num_first, num_last = self.protected(num_tokens, start)
        # The end of a chunk is the middle of its prompt.
        num_last = 0 if goes_on else num_last
        if geometry.has_windows:
            return order_beside_windows(self.policy, show, geometry, token_slots, total, num_first, num_last)
        return self.policy.order(show, geometry, total, num_first, num_last)

    def state(self) -> dict[str, Any]:
        """Policy, budget, bits, when prompts are compressed, and learned scores, as plain values."""
        state = {"policy": self.policy.name} | self.config.model_dump(include={"budget", "bits", "compress"})
        if self.learned is None:
            return state
        weights, is_stale = self.learned.weights, self.learned.is_stale
        texts, recall = (0, None) if weights is None else (weights.num_prefixes, weights.recall)
        return state | {"learned_scores": {"texts": texts, "recall": recall, "is_stale": is_stale}}
