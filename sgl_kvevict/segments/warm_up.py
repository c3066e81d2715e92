"""Warm-up: runs every kernel of compression once, so that none compiles while serving."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvevict_kernels.row_codec import RowCoding
from sgl_kvevict.distill.weights import LearnedScores, ScoreWeights
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.prompt_observation import Observation, PromptObservation
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.segments.segment import Packed, Segment, View
from sgl_kvevict.segments.sources import Range, Source, TokenRange

WARM_UP_TOKENS = 192
"""Minimum length of the synthetic prompt: more than the default windows and SnapKV's widest pool (127)."""


def warm_up(compressor: Compressor, q_dtype: torch.dtype) -> None:
    """Do once everything that runs a kernel of compression, with a synthetic prompt in a small arena of its own.

    The prompt is observed, ranked, packed, split, read and resized. SGLang's warm-up prompts are too short to be
    compressed. The compressor's arena stays unchanged.
    """
    real = compressor.packer
    num_tokens = max(WARM_UP_TOKENS, 2 * compressor.policy.scorer.window_size)
    geometry = replace(real.geometry, num_token_slots=num_tokens + 1)
    shape = geometry.arena_shape
    device = real.k_arena.device
    random = torch.Generator(device=device).manual_seed(0)
    k, v = (torch.randn(shape, generator=random, device=device).to(real.k_arena.dtype) for _ in range(2))
    # An arena of its own: token slots of the real one belong to SGLang's allocator.
    packer = SegmentPacker(
        geometry, k, v, coding=None if real.coding is None else RowCoding.of(k, real.coding.statistics)
    )
    learned = compressor.learned
    if learned is not None:  # they may be unknown yet
        learned = LearnedScores(learned.rotary, ScoreWeights.zeros(geometry, device))
    twin = replace(compressor, packer=packer, learned=learned, slot_positions=None, stream=None)
    queries = torch.randn(num_tokens, geometry.num_qo_heads, geometry.head_dim, generator=random, device=device)
    slots = torch.arange(1, num_tokens + 1, device=device)
    observation = _observe(twin, queries.to(q_dtype), slots)
    keys = twin.rank(slots, 0, observation, turn=0).keys
    source = TokenRange(slots, 0, keys, twin.config.num_sinks(num_tokens))
    first, *others = (twin.config.num_slots(num_tokens, share=share) for share in twin.config.shares)
    segment = Segment(geometry, 0, num_tokens, _written(twin, source, first, observation))
    for num_slots in others:  # so that rows get fewer bits
        _resize(twin, segment, segment.live_view, min(num_slots, segment.num_slots))
    if twin.splittable:
        upper = View(segment, 0, num_tokens // 2)
        segment.runs_of(upper.start, upper.end)
        segment.runs_of(upper.end, num_tokens)
        _resize(twin, segment, upper)
    _resize(twin, segment, segment.live_view, max(segment.num_slots // 2, segment.packed.num_sinks, 1))


def _resize(compressor: Compressor, segment: Segment, view: View, num_slots: int | None = None) -> None:
    """Write the best entries of a part of a segment anew (None: all)."""
    segment.pack(_written(compressor, view, num_slots), view.end)


def _written(
    compressor: Compressor, of: Range, num_slots: int | None, observation: Observation | None = None
) -> Packed:
    """Write the best entries of a range (None: all); with ``observation`` others are merged into them."""
    packer = compressor.packer
    source, merge = Source(packer.geometry, of), None
    if num_slots is not None:
        source = source.best(num_slots, compressor.config.bits)
    if observation is not None:
        merge = compressor.merge(source, observation)
    return packer.rewrite(source, max(source.fewest_slots, 1), merge)[0]


def _observe(compressor: Compressor, queries: Tensor, slots: Tensor) -> Observation:
    """Observe a prefill of the synthetic prompt."""
    num_tokens = slots.numel()
    packer = compressor.packer
    lse = torch.full(queries.shape[:2], 6.0, device=queries.device)
    scale = float(queries.shape[2] ** -0.5)
    prompt = PromptObservation(compressor.observes)
    prompt.begin_chunk(0, num_tokens, is_last=True, token_slots=slots)
    for layer in range(packer.geometry.num_layers):
        prompt.record(layer, queries, lse, packer.k_arena[layer], scale)
    return prompt
