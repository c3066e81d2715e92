from __future__ import annotations

import torch
from torch import Tensor

from helpers.packing import pack, squeeze
from helpers.references import accumulated_attention_reference
from sgl_kvevict.compression import ReaderObservation
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.prefix import Segment, SegmentPacker, Span
from sgl_kvevict.ragged import Selection

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


def forward(
    observation: ReaderObservation, *chunks: tuple[Reader, int, int], segments: tuple[Segment, ...] = ()
) -> None:
    """One forward over chunks of readers: all of them are announced before the first layer runs."""
    slots = SLOTS[observation.start - START :]
    begun = [observation.begin_chunk(reader, END + a, END + b, slots, segments) for reader, a, b in chunks]
    for layer in range(2):
        for chunk, (reader, a, b) in zip(begun, chunks, strict=True):
            chunk.record(layer, reader.queries[layer][a:b], reader.lse[layer][a:b], KEYS[layer], 0.25)


def assert_saw(observation: ReaderObservation, *readers: Reader) -> None:
    for layer in range(2):
        want = torch.stack([reader.squares(layer) for reader in readers]).sum(0).sqrt()
        seen = observation.show(layer, START + 3, KEYS[layer], KEYS[layer], SLOTS[3:10])
        torch.testing.assert_close(seen.signals[Signal.READER_ATTENTION], want[:, 3:10])
        assert seen.sm_scale == 0.25


def test_chunks_and_readers_add_up() -> None:
    observation = ReaderObservation(GEOMETRY, START, END)
    first, second, third = Reader(1, 9), Reader(2, 5), Reader(3, 7)
    forward(observation, (first, 0, 4), (second, 0, 5))
    forward(observation, (first, 4, 9), (third, 0, 7))
    assert_saw(observation, first, second, third)


def test_a_reader_that_runs_again_counts_once() -> None:
    """Retracted after 6 of 9 queries; run again in chunks that begin, end and lie before, at and after that."""
    observation = ReaderObservation(GEOMETRY, START, END)
    reader, other = Reader(1, 9), Reader(2, 5)
    forward(observation, (reader, 0, 6))
    forward(observation, (reader, 0, 2), (other, 0, 5))
    forward(observation, (reader, 2, 6))
    forward(observation, (reader, 5, 8))
    forward(observation, (reader, 8, 9))
    assert_saw(observation, reader, other)


def test_attention_counts_for_the_tokens_around_it() -> None:
    observation = ReaderObservation(GEOMETRY, START, END, reach=3)
    reader = Reader(1, 9)
    forward(observation, (reader, 0, 9))
    for layer in range(2):
        squares = reader.squares(layer)
        want = torch.stack([squares[:, max(i - 3, 0) : i + 4].mean(1) for i in range(END - START)], dim=1).sqrt()
        # What is shown of a part knows what was attended to beside it.
        seen = observation.show(layer, START + 5, KEYS[layer], KEYS[layer], SLOTS[5:9])
        torch.testing.assert_close(seen.signals[Signal.READER_ATTENTION], want[:, 5:9])


def test_before_the_first_reader_nothing_is_shown() -> None:
    seen = ReaderObservation(GEOMETRY, START, END).show(0, START, KEYS[0], KEYS[0], SLOTS)
    assert Signal.READER_ATTENTION not in seen.signals


def compressed(num_tokens: int) -> tuple[SegmentPacker, Span, Tensor]:
    """The first tokens of the range in a segment; also [num_entries]: the run, and the token, of each entry."""
    arena = torch.stack(KEYS)
    store = SegmentPacker(GEOMETRY, arena, arena.clone())
    kept = torch.rand(6, num_tokens, generator=torch.Generator().manual_seed(3)) < 0.5
    kept[2] = False
    where = kept.nonzero()
    lens = kept.sum(1, dtype=torch.int32).view(2, 3)
    order = torch.arange(len(where), dtype=torch.int16)
    segment, _ = pack(store, SLOTS[:num_tokens], START, Selection(lens, where[:, 1].int(), len(where)), order=order)
    return store, Span(segment, START, START + num_tokens, is_owner=True), where


def paid(where: Tensor, *readers: Reader) -> Tensor:
    """[num_entries], what readers paid the entries of a segment."""
    by_run = torch.stack([torch.stack([reader.squares(layer) for reader in readers]).sum(0) for layer in range(2)])
    return by_run.flatten(0, 1)[where[:, 0], where[:, 1]]


def test_entries_of_a_segment_are_read() -> None:
    store, span, where = compressed(END - START)
    observation = ReaderObservation(GEOMETRY, END, END, segments=[span.segment], k_arena=store.k_arena)
    assert observation.num_bytes == 4 * 6 * span.segment.num_slots
    first, second = Reader(1, 9), Reader(2, 5)
    forward(observation, (first, 0, 4), segments=(span.segment,))
    forward(observation, (first, 2, 9), (second, 0, 5), segments=(span.segment,))
    torch.testing.assert_close(span.segment.entry_attention.squares, paid(where, first, second))


def test_what_was_seen_goes_on_with_the_entries_when_slots_are_short() -> None:
    """The range is compressed between two chunks of a reader, and squeezed before the last one."""
    first, second = Reader(1, 9), Reader(2, 5)
    store, span, where = compressed(13)
    observation = ReaderObservation(GEOMETRY, START, END, k_arena=store.k_arena)
    forward(observation, (first, 0, 9))
    forward(observation, (second, 0, 2))
    observation.hand_over(span.segment)
    assert (observation.start, observation.end) == (START + 13, END) and observation.observes(span.segment)
    forward(observation, (second, 2, 3), segments=(span.segment,))
    squeeze(store, [span], 3)
    forward(observation, (second, 3, 5), segments=(span.segment,))
    kept = torch.arange(len(where))[-18:]  # 3 slots of 6 heads
    torch.testing.assert_close(span.segment.entry_attention.squares, paid(where, first, second)[kept])
    for layer in range(2):
        want = (first.squares(layer) + second.squares(layer)).sqrt()
        seen = observation.show(layer, START + 13, KEYS[layer], KEYS[layer], SLOTS[13:])
        torch.testing.assert_close(seen.signals[Signal.READER_ATTENTION], want[:, 13:])


def test_what_was_not_seen_whole_is_not_handed_over() -> None:
    store, span, _ = compressed(13)
    for start, end, reach in ((START, START + 12, 0), (START + 1, END, 0), (START, END, 2)):
        observation = ReaderObservation(GEOMETRY, start, end, reach, k_arena=store.k_arena)
        observation.hand_over(span.segment)
        assert observation.start == start and not observation.observes(span.segment)


def test_a_range_that_is_computed_again_reads_itself_to_nobodys_account() -> None:
    """It is not cached any more; the chunk in which it ends goes on with a reader's questions."""
    observation = ReaderObservation(GEOMETRY, START, END)
    reader = Reader(1, 9)
    before = [normal(77, 6, 6, 16), normal(78, 6, 6)]
    chunk = observation.begin_chunk(reader, END - 6, END + 4, SLOTS)
    for layer in range(2):
        queries = torch.cat([before[0], reader.queries[layer][:4]])
        chunk.record(layer, queries, torch.cat([before[1], reader.lse[layer][:4]]), KEYS[layer], 0.25)
    forward(observation, (reader, 4, 9))
    assert_saw(observation, reader)


def test_what_never_shrinks_is_not_read_further() -> None:
    store, span, _ = compressed(13)
    span.segment.order = None
    observation = ReaderObservation(GEOMETRY, START, END, k_arena=store.k_arena)
    observation.hand_over(span.segment)
    assert observation.start == START and not observation.observes(span.segment)


def test_memory_is_counted_in_what_all_ranks_have_alike() -> None:
    """Slots of a segment, not its entries: a repack leaves as many slots and other numbers of entries."""
    store, span, _ = compressed(13)
    observation = ReaderObservation(GEOMETRY, START + 13, END, segments=(span.segment,), k_arena=store.k_arena)
    assert observation.num_bytes == 4 * 6 * (END - START - 13 + span.segment.num_slots)
