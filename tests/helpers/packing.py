"""Short forms of :meth:`SegmentPacker.rewrite` for tests that have segments, and no table of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.prompt_observation import Observation
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.segments.segment import Segment, View
from sgl_kvevict.segments.sources import KeptRows, Source, TokenRange


@dataclass(frozen=True)
class Selection:
    """Kept entries of a range: [num_layers, num_kv_heads] of each run, and the tokens' indices, run after run."""

    keep_lens: Tensor
    indices: Tensor
    num_entries: int


def selected(*runs: list[int], num_heads: int = 2) -> Selection:
    """Tokens that each run keeps, head after head and layer after layer."""
    lens = torch.tensor([len(run) for run in runs], dtype=torch.int32).view(-1, num_heads)
    indices = torch.tensor([index for run in runs for index in run], dtype=torch.int32)
    return Selection(lens, indices, len(indices))


def ordered(segment: Segment, keys: Tensor | None) -> None:
    """Give a segment an order, or none."""
    segment.packed = replace(segment.packed, rows=replace(segment.packed.rows, keys=keys))


def kept_rows(selection: Selection, num_tokens: int) -> KeptRows:
    """The selected entries of uncompressed tokens, in rows of 16 bits."""
    lens = selection.keep_lens.flatten().long()
    runs = torch.arange(lens.numel()).repeat_interleave(lens)
    numbers = runs * num_tokens + selection.indices
    return KeptRows(16, numbers, selection.keep_lens, selection.num_entries)


def pack(
    packer: SegmentPacker, token_slots: Tensor, start: int, selection: Selection, order: Tensor | None = None
) -> tuple[Segment, Tensor]:
    """Write the selected entries of uncompressed tokens into as few of their slots as they take."""
    source = Source(packer.geometry, TokenRange(token_slots, start), kept_rows(selection, token_slots.numel()))
    packed, freed = packer.rewrite(source, source.fewest_slots)
    segment = Segment(packer.geometry, source.start, source.end, packed)
    ordered(segment, order)
    return segment, freed


def compress(
    compressor: Compressor, token_slots: Tensor, start: int, observation: Observation, share: float | None = None
) -> tuple[Segment, Tensor]:
    """Rank uncompressed tokens, and pack what a share (None: the budget) keeps; also the slots that are free."""
    packer, config, num_tokens = compressor.packer, compressor.config, token_slots.numel()
    num_slots = config.num_slots(num_tokens, start, share)
    merge, keys = None, None
    if num_slots < num_tokens:
        keys = compressor.rank(token_slots, start, observation, turn=0).keys
    source = Source(packer.geometry, TokenRange(token_slots, start, keys))
    if num_slots < num_tokens:
        source = source.best(num_slots)
        merge = compressor.merge(source, observation)
    packed, freed = packer.rewrite(source, source.fewest_slots, merge)
    segment = Segment(packer.geometry, start, source.end, packed)
    segment.splittable = not (packer.geometry.has_windows and num_slots < num_tokens)
    return segment, freed


def resize(packer: SegmentPacker, segment: Segment, num_slots: int) -> Tensor:
    """Keep the best live entries of a segment in so many slots; return the others."""
    return _rewrite(packer, segment, Source(packer.geometry, segment.live_view).best(num_slots), num_slots)


def repack(packer: SegmentPacker, segment: Segment, end: int) -> Tensor:
    """Write the entries of tokens before ``end`` into as few slots as they take; return the others."""
    source = Source(packer.geometry, View(segment, segment.start, end))
    return _rewrite(packer, segment, source, source.fewest_slots)


def _rewrite(packer: SegmentPacker, segment: Segment, source: Source, num_slots: int) -> Tensor:
    packed, freed = packer.rewrite(source, num_slots)
    segment.pack(packed, source.end)
    return freed
