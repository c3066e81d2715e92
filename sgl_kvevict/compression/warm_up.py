"""Warm-up: runs every kernel of compression once, so that none compiles while serving."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sgl_kvevict.compression.compressor import Compressor
from sgl_kvevict.compression.generated import GeneratedCompressor
from sgl_kvevict.compression.prompt_observation import PromptObservation
from sgl_kvevict.compression.reader_observation import ReaderObservation
from sgl_kvevict.distill import LearnedScores, ScoreWeights
from sgl_kvevict.prefix import SegmentPacker, Sources, Span, live_view

WARM_UP_TOKENS = 192
"""Minimum length of the synthetic prompt: more than the default windows and SnapKV's widest pool (127)."""


def warm_up(compressor: Compressor, q_dtype: torch.dtype) -> None:
    """Observe, compress, split, repack, read, generate and squeeze a synthetic prompt in a separate small arena.

    SGLang's warm-up prompts are too short to be compressed. The compressor's arena stays unchanged.
    """
    real = compressor.packer
    num_tokens = max(WARM_UP_TOKENS, 2 * compressor.policy.window_size)
    geometry = replace(real.geometry, num_token_slots=num_tokens + 1)
    shape = geometry.arena_shape
    device = real.k_arena.device
    random = torch.Generator(device=device).manual_seed(0)
    k, v = (torch.randn(shape, generator=random, device=device).to(real.k_arena.dtype) for _ in range(2))
    packer = SegmentPacker(geometry, k, v)
    learned = compressor.learned
    if learned is not None:  # they may be unknown yet
        learned = LearnedScores(learned.rotary, ScoreWeights.zeros(geometry, device))
    twin = replace(compressor, packer=packer, learned=learned, slot_positions=None, stream=None)
    queries = torch.randn(num_tokens, geometry.num_qo_heads, geometry.head_dim, generator=random, device=device)
    slots = torch.arange(1, num_tokens + 1, device=device)
    observation = _observe(twin, queries.to(q_dtype), slots)
    segment = twin.compress(slots, 0, observation).segment
    span = Span(segment, 0, num_tokens, is_owner=True)
    if segment.splittable:
        upper, lower = span.split(num_tokens // 2)
        for part in (upper, lower):
            part.runs()
        lower.drop()
        _rewrite(packer, upper, Sources(geometry, [live_view([upper])]))
        span = upper
    if twin.policy.needs_passes:
        _read(twin, span, queries.to(q_dtype))
    if twin.config.decode_block is not None:
        _generate(twin, queries.to(q_dtype), slots)
    if span.segment.order is not None:
        num_slots = max(span.segment.num_slots // 2, 1)
        _rewrite(packer, span, Sources(geometry, [live_view([span])]).best(num_slots))


def _rewrite(packer: SegmentPacker, span: Span, sources: Sources) -> None:
    """Write the kept entries of the only span of a segment anew."""
    span.move_to(packer.rewrite(sources, sources.fewest_slots, bits=16)[0])


def _observe(compressor: Compressor, queries: Tensor, slots: Tensor) -> PromptObservation | ReaderObservation:
    """Observe a prefill of the synthetic prompt, or a scoring pass if the policy waits for passes."""
    num_tokens = slots.numel()
    packer = compressor.packer
    lse = torch.full(queries.shape[:2], 6.0, device=queries.device)
    scale = float(queries.shape[2] ** -0.5)
    if not compressor.compresses_at_once:
        readers = compressor.new_reader_observation(0, num_tokens)
        chunk = readers.begin_chunk(readers, num_tokens, 2 * num_tokens, slots)
        for layer in range(packer.geometry.num_layers):
            chunk.record(layer, queries, lse, packer.k_arena[layer], scale)
        return readers
    prompt = compressor.new_observation()
    prompt.begin_chunk(0, num_tokens, is_last=True, token_slots=slots)
    for layer in range(packer.geometry.num_layers):
        prompt.record(layer, queries, lse, packer.k_arena[layer], scale)
    return prompt


def _read(compressor: Compressor, span: Span, queries: Tensor) -> None:
    """Observe a reader of the span's segment."""
    packer, segment = compressor.packer, span.segment
    readers = compressor.new_reader_observation(span.end, span.end, segments=[segment])
    no_slots = segment.token_slots[:0]
    chunk = readers.begin_chunk(readers, span.end, span.end + len(queries), no_slots, [segment])
    lse = torch.full(queries.shape[:2], 6.0, device=queries.device)
    chunk.record(0, queries, lse, packer.k_arena[0], float(queries.shape[2] ** -0.5))


def _generate(compressor: Compressor, queries: Tensor, slots: Tensor) -> None:
    """Generate the second half of the synthetic prompt, in blocks of odd and even lengths."""
    generation = GeneratedCompressor(compressor)
    num_tokens = slots.numel()
    generated = generation.new(num_tokens // 2)
    lse = torch.full((1, queries.shape[1]), 6.0, device=queries.device)
    scale = float(queries.shape[2] ** -0.5)
    ends = [num_tokens * 3 // 4 - 1, num_tokens - 2, num_tokens - 1]
    for position in range(generated.start, num_tokens):
        step = generation.step([(0, position, generated)], 1)
        if step is not None:
            for layer in range(compressor.packer.geometry.num_layers):
                step.record(layer, queries[position : position + 1], lse, scale)
        if generation.is_full(generated):
            generation.count(generated, slots[generated.compressed_end : position + 1])
        if position in ends:
            new = slots[generated.compressed_end : position + 1]
            generation.compress(generated, new, new.numel(), None)
