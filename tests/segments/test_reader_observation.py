from __future__ import annotations

import torch
from torch import Tensor

from helpers.packing import ordered, squeeze
from helpers.references import accumulated_attention_reference
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.segments import KeptRows, MeasuredRange, ReaderObservation, Segment, SegmentPacker, Sources, TokenRange

GEOMETRY = KVGeometry(num_layers=2, num_qo_heads=6, num_kv_heads=3, head_dim=16, num_token_slots=60)
START, END = 4, 24
SLOTS = torch.randperm(60, generator=torch.Generator().manual_seed(0))[: END - START]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


KEYS = [normal(layer, 60, 3, 16) for layer in range(2)]


class Reader:
    """Queries after the range; [layer][token]."""

    def __init__(self, seed: int, num_queries: int) -> None:
        self.name = f"reader-{seed}"
        self.queries = [normal(seed * 10 + layer, num_queries, 6, 16) for layer in range(2)]
        self.lse = [3.0 + normal(seed * 10 + layer + 5, num_queries, 6) for layer in range(2)]

    def squares(self, layer: int) -> Tensor:
        return accumulated_attention_reference(
            self.queries[layer],
            self.lse[layer],
            KEYS[layer],
            SLOTS,
            sm_scale=0.25,
            key_start=START,
            query_start=END,
            reduction="squares",
        )


ARENA = torch.stack(KEYS)


def observed(radius: int = 0, end: int = END) -> tuple[ReaderObservation, Segment]:
    """Nobody has read the range yet, which is in place."""
    segment, observation = Segment(GEOMETRY, START, end), ReaderObservation(GEOMETRY, ARENA, END, radius)
    observation.observe(segment)
    return observation, segment


def forward(observation: ReaderObservation, segment: Segment, *chunks: tuple[Reader, int, int]) -> None:
    """One forward over chunks of readers: all of them are announced before the first layer runs."""
    slots = SLOTS[: segment.num_tokens] if segment.packed is None else None
    begun = [observation.begin_chunk(reader, END + a, END + b, [(segment, slots)]) for reader, a, b in chunks]
    for layer in range(2):
        for chunk, (reader, a, b) in zip(begun, chunks, strict=True):
            chunk.record(layer, reader.queries[layer][a:b], reader.lse[layer][a:b], KEYS[layer], 0.25)


def shown(observation: ReaderObservation, segment: Segment, layer: int) -> LayerView:
    assert segment.attention is not None
    return MeasuredRange(observation, segment.attention).show(layer, START, KEYS[layer], KEYS[layer], SLOTS)


def assert_saw(observation: ReaderObservation, segment: Segment, *readers: Reader) -> None:
    for layer in range(2):
        want = torch.stack([reader.squares(layer) for reader in readers]).sum(0).sqrt()
        seen = shown(observation, segment, layer)
        torch.testing.assert_close(seen.signals[Signal.READER_ATTENTION], want)
        assert seen.sm_scale == 0.25


def test_chunks_and_readers_add_up() -> None:
    observation, segment = observed()
    first, second, third = Reader(1, 9), Reader(2, 5), Reader(3, 7)
    forward(observation, segment, (first, 0, 4), (second, 0, 5))
    forward(observation, segment, (first, 4, 9), (third, 0, 7))
    assert_saw(observation, segment, first, second, third)


def test_a_reader_that_runs_again_counts_once() -> None:
    """Retracted after 6 of 9 queries; run again in chunks that begin, end and lie before, at and after that."""
    observation, segment = observed()
    reader, other = Reader(1, 9), Reader(2, 5)
    forward(observation, segment, (reader, 0, 6))
    forward(observation, segment, (reader, 0, 2), (other, 0, 5))
    forward(observation, segment, (reader, 2, 6))
    forward(observation, segment, (reader, 5, 8))
    forward(observation, segment, (reader, 8, 9))
    assert_saw(observation, segment, reader, other)


def test_attention_counts_for_the_tokens_around_it() -> None:
    observation, segment = observed(radius=3)
    reader = Reader(1, 9)
    forward(observation, segment, (reader, 0, 9))
    for layer in range(2):
        squares = reader.squares(layer)
        want = torch.stack([squares[:, max(i - 3, 0) : i + 4].mean(1) for i in range(END - START)], dim=1).sqrt()
        seen = shown(observation, segment, layer)
        torch.testing.assert_close(seen.signals[Signal.READER_ATTENTION], want)


def pack_some(segment: Segment, num_tokens: int) -> tuple[SegmentPacker, Tensor]:
    """Pack about half of a range's entries; also [num_entries]: the run, and the token, of each entry."""
    store = SegmentPacker(GEOMETRY, ARENA, ARENA.clone())
    kept = torch.rand(6, num_tokens, generator=torch.Generator().manual_seed(3)) < 0.5
    kept[2] = False
    where = kept.nonzero()
    lens = kept.sum(1, dtype=torch.int32).view(2, 3)
    keys = torch.zeros(2, 3, num_tokens, dtype=torch.int16)
    keys.view(6, -1)[kept] = torch.arange(len(where), dtype=torch.int16)
    ordered(segment, keys)
    tokens = TokenRange(SLOTS[:num_tokens], START, keys, segment.attention)
    sources = Sources(GEOMETRY, [tokens], (KeptRows(16, kept.flatten().nonzero().squeeze(1), lens),))
    written = store.rewrite(sources, sources.fewest_slots)
    segment.pack(written.packed, sources.end, written.kept)
    return store, where


def paid(where: Tensor, *readers: Reader) -> Tensor:
    """[num_entries], what readers paid the entries of a segment."""
    by_run = torch.stack([torch.stack([reader.squares(layer) for reader in readers]).sum(0) for layer in range(2)])
    return by_run.flatten(0, 1)[where[:, 0], where[:, 1]]


def restore() -> None:
    ARENA.copy_(torch.stack(KEYS))


def test_entries_of_a_packed_segment_are_read() -> None:
    segment = Segment(GEOMETRY, START, END)
    _, where = pack_some(segment, END - START)
    observation = ReaderObservation(GEOMETRY, ARENA, END)
    observation.observe(segment)
    assert observation.num_bytes == 4 * 6 * segment.num_slots  # slots: ranks keep other numbers of entries
    first, second = Reader(1, 9), Reader(2, 5)
    forward(observation, segment, (first, 0, 4))
    forward(observation, segment, (first, 2, 9), (second, 0, 5))
    torch.testing.assert_close(segment.attention, paid(where, first, second))
    restore()


def test_what_was_seen_goes_on_with_the_entries_when_slots_are_short() -> None:
    """The range is packed between two chunks of a reader, and shrinks before the last one."""
    first, second = Reader(1, 9), Reader(2, 5)
    observation, segment = observed(end=START + 13)
    forward(observation, segment, (first, 0, 9))
    forward(observation, segment, (second, 0, 2))
    store, where = pack_some(segment, 13)
    forward(observation, segment, (second, 2, 3))
    squeeze(store, segment, 3)
    forward(observation, segment, (second, 3, 5))
    kept = torch.arange(len(where))[-18:]  # 3 slots of 6 heads
    torch.testing.assert_close(segment.attention, paid(where, first, second)[kept])
    restore()


def test_a_range_that_is_cut_is_read_on_in_two_parts() -> None:
    reader = Reader(1, 9)
    observation, segment = observed()
    forward(observation, segment, (reader, 0, 5))
    above = segment.cut_off(START + 8)
    chunk = observation.begin_chunk(reader, END + 5, END + 9, [(above, SLOTS[:8]), (segment, SLOTS[8:])])
    for layer in range(2):
        chunk.record(layer, reader.queries[layer][5:], reader.lse[layer][5:], KEYS[layer], 0.25)
    assert above.attention is not None and segment.attention is not None and above.readers is observation
    for layer in range(2):
        squares = torch.cat([above.attention[layer], segment.attention[layer]], dim=-1)
        torch.testing.assert_close(squares, reader.squares(layer))


def test_a_range_that_is_computed_again_reads_itself_to_nobodys_account() -> None:
    """It is not cached any more; the chunk in which it ends goes on with a reader's questions."""
    observation, segment = observed()
    reader = Reader(1, 9)
    before = [normal(77, 6, 6, 16), normal(78, 6, 6)]
    chunk = observation.begin_chunk(reader, END - 6, END + 4, [(segment, SLOTS)])
    for layer in range(2):
        queries = torch.cat([before[0], reader.queries[layer][:4]])
        chunk.record(layer, queries, torch.cat([before[1], reader.lse[layer][:4]]), KEYS[layer], 0.25)
    forward(observation, segment, (reader, 4, 9))
    assert_saw(observation, segment, reader)
