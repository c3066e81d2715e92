"""Rows of 16 and of 4 bits on every way that a prefix takes through the tree.

After each operation the harness reads what the requests read, and compares every entry, decoded, with what was written
of its token in 16 bits, sent through the formats that its row may have had.
"""

from __future__ import annotations

import pytest
import torch

from helpers.admission import LongPromptScheduler
from helpers.harness import DOCUMENT, Harness
from helpers.harness_store import Server, identity_for
from kvevict_kernels.row_codec import read_rows
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.config import Bits, KVEvictConfig
from sgl_kvevict.segments.segment import Segment

WIDTHS: dict[Bits, set[int]] = {16: {16}, "auto": {16, 4}}
"""Of rows of a segment with sinks, by the configured bits."""
FORMATS = pytest.mark.parametrize("bits", list(WIDTHS))


def segments(harness: Harness) -> list[Segment]:
    return list(harness.tree.prefixes.table.packed)


def widths(harness: Harness) -> set[int]:
    return {bits for segment in segments(harness) for bits in segment.entries_by_bits}


def contents(harness: Harness) -> list[tuple[int, list[int], torch.Tensor, torch.Tensor]]:
    """Of the sinks and the others of the only segment: bits, positions, and the bytes of keys and values."""
    (segment,) = segments(harness)
    coding = harness.tree.packer.coding

    def stored(part: SpanRuns) -> list[torch.Tensor]:
        steps = [None, None] if coding is None or part.bits == 16 else [coding.k_steps, coding.v_steps]
        return [read_rows(arena, part.rows, of) for (arena, _), of in zip(harness.arenas, steps, strict=True)]

    return [(part.bits, part.positions.tolist(), *stored(part)) for part in segment.runs_of(segment.start, segment.end)]


def same_contents(ours, theirs) -> bool:
    return all(
        bits == other_bits and tokens == other_tokens and k.equal(other_k) and v.equal(other_v)
        for (bits, tokens, k, v), (other_bits, other_tokens, other_k, other_v) in zip(ours, theirs, strict=True)
    )


@FORMATS
def test_a_prefix_is_split_and_shrinks_while_it_is_read(bits):
    harness = Harness(num_slots=240, bits=bits)
    reader = harness.run([*DOCUMENT, 1])
    harness.finish(harness.run(DOCUMENT[:20] + [9] * 12))
    assert harness.decode(reader) and widths(harness) == WIDTHS[bits]
    before = [segment.num_slots for segment in segments(harness)]
    while harness.evict(1):
        assert harness.decode(reader)
    assert sum(segment.num_slots for segment in segments(harness)) < sum(before)
    totals = harness.tree.prefixes.totals
    assert totals.splits and totals.resizes
    harness.finish(reader)


@FORMATS
def test_what_is_left_of_a_prefix_is_repacked_while_it_is_read(bits):
    """The part below a cut goes, and its entries with it."""
    config = KVEvictConfig(budget=0.3, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6, min_budget=None)
    harness = Harness(num_slots=240, bits=bits, config=config)
    harness.finish(harness.run(DOCUMENT))
    reader = harness.run([*DOCUMENT[:20], 1, 1])
    while not harness.tree.prefixes.totals.repacks:
        assert harness.evict(1) and harness.decode(reader)
    assert widths(harness) == WIDTHS[bits]
    harness.finish(reader)


@FORMATS
def test_what_was_dropped_to_the_host_comes_back_byte_for_byte(bits):
    harness = Harness(host_blocks=60, bits=bits)
    harness.finish(harness.run(DOCUMENT))
    (segment,), before = segments(harness), contents(harness)
    rows, order = segment.packed.rows, segment.keys
    harness.drop_all()
    harness.finish(harness.run([1, 1, 1]))  # so that slots are others
    reader = harness.run([*DOCUMENT, 1, 1])
    assert reader is not None and harness.decode(reader) and same_contents(contents(harness), before)
    (segment,) = segments(harness)
    assert segment.packed.rows.indptr.equal(rows.indptr) and segment.keys.equal(order)
    assert harness.tree.prefixes.totals.moved_in_tokens == 60


@FORMATS
def test_what_was_stored_comes_back_byte_for_byte(bits, tmp_path):
    ours = identity_for(Harness(bits=bits))
    first = Server(tmp_path, ours, num_slots=200, bits=bits)
    assert first.serve(DOCUMENT) == 0
    second = Server(tmp_path, ours, num_slots=200, bits=bits)
    assert second.serve([*DOCUMENT[:56], 9, 9, 9]) == 56
    assert widths(second.harness) == WIDTHS[bits]
    assert same_contents(contents(second.harness), contents(first.harness))


@FORMATS
def test_chunks_of_a_prompt_longer_than_the_pool_become_segments(bits):
    config = KVEvictConfig(budget=0.3, tail_tokens=4, sink_tokens=2, min_prefix_tokens=12)
    harness = Harness(scores_any_range=True, config=config, max_tokens=1024, bits=bits)
    scheduler = LongPromptScheduler(harness, chunk=20)
    prompt = harness.request([i * 7 % 11 for i in range(2 * harness.num_slots)])
    assert scheduler.submit(prompt) is None
    while not prompt.output_ids:
        assert scheduler.round() and not scheduler.aborted
    assert len(segments(harness)) > 10 and widths(harness) <= WIDTHS[bits]
    for _ in range(3):
        assert harness.decode(prompt)
