"""Short forms of :meth:`SegmentPacker.rewrite` for tests that have segments, and no table of them."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kvevict.ragged import MergePlan, Selection
from sgl_kvevict.segments import (
    Compressor,
    KeptRows,
    Observation,
    Segment,
    SegmentPacker,
    Sources,
    TokenRange,
    View,
)


def ordered(segment: Segment, keys: Tensor) -> None:
    """Give a segment an order."""
    segment.keys = keys


def kept_rows(selection: Selection, num_tokens: int) -> tuple[KeptRows]:
    """The selected entries of uncompressed tokens, in rows of 16 bits."""
    lens = selection.keep_lens.flatten().long()
    runs = torch.arange(lens.numel()).repeat_interleave(lens)
    return (KeptRows(16, runs * num_tokens + selection.indices, selection.keep_lens),)


def pack(
    packer: SegmentPacker,
    token_slots: Tensor,
    start: int,
    selection: Selection,
    *,
    merge: MergePlan | None = None,
    order: Tensor | None = None,
) -> tuple[Segment, Tensor]:
    """Write the selected entries of uncompressed tokens into as few of their slots as they take."""
    sources = Sources(packer.geometry, [TokenRange(token_slots, start)], kept_rows(selection, token_slots.numel()))
    written = packer.rewrite(sources, sources.fewest_slots, merge=merge)
    segment = Segment(packer.geometry, sources.start, sources.end, written.packed)
    if order is not None:
        ordered(segment, order)
    return segment, written.freed


def compress(
    compressor: Compressor, token_slots: Tensor, start: int, observation: Observation, share: float | None = None
) -> tuple[Segment, Tensor]:
    """Rank uncompressed tokens, and pack what a share (None: the budget) keeps; also the slots that are free."""
    packer, config, num_tokens = compressor.packer, compressor.config, token_slots.numel()
    num_slots = config.num_slots(num_tokens, start, share)
    merge, keys = None, None
    if num_slots < num_tokens:
        keys = compressor.rank(token_slots, start, observation, turn=0).keys
    sources = Sources(packer.geometry, [TokenRange(token_slots, start, keys)])
    if num_slots < num_tokens:
        sources = sources.best(num_slots)
        assert sources.selection is not None
        merge = compressor.merge(token_slots, start, observation, sources.selection)
    written = packer.rewrite(sources, sources.fewest_slots, merge)
    segment = Segment(packer.geometry, start, sources.end, written.packed, written.kept.keys)
    segment.splittable = not (packer.geometry.has_windows and num_slots < num_tokens)
    return segment, written.freed


def resize(packer: SegmentPacker, segment: Segment, num_slots: int) -> Tensor:
    """Keep the best live entries of a segment in so many slots; return the others."""
    return _rewrite(packer, segment, Sources(packer.geometry, [segment.live_view]).best(num_slots), num_slots)


def repack(packer: SegmentPacker, segment: Segment, end: int) -> Tensor:
    """Write the entries of tokens before ``end`` into as few slots as they take; return the others."""
    sources = Sources(packer.geometry, [View(segment, segment.start, end)])
    return _rewrite(packer, segment, sources, sources.fewest_slots)


def _rewrite(packer: SegmentPacker, segment: Segment, sources: Sources, num_slots: int) -> Tensor:
    written = packer.rewrite(sources, num_slots)
    segment.pack(written.packed, sources.end, written.kept)
    return written.freed
