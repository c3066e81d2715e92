from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.accumulated_attention import accumulated_attention_reference
from sgl_kvevict.compression import ReaderObservation
from sgl_kvevict.geometry import KVGeometry

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


def forward(observation: ReaderObservation, *chunks: tuple[Reader, int, int]) -> None:
    """One forward over chunks of readers: all of them are announced before the first layer runs."""
    begun = [observation.begin_chunk(reader, END + a, END + b, SLOTS) for reader, a, b in chunks]
    for layer in range(2):
        for chunk, (reader, a, b) in zip(begun, chunks, strict=True):
            chunk.record(layer, reader.queries[layer][a:b], reader.lse[layer][a:b], KEYS[layer], 0.25)


def assert_saw(observation: ReaderObservation, *readers: Reader) -> None:
    for layer in range(2):
        want = torch.stack([reader.squares(layer) for reader in readers]).sum(0).sqrt()
        seen = observation.show(layer, START + 3, KEYS[layer], KEYS[layer], SLOTS[3:10])
        torch.testing.assert_close(seen.reader_attention, want[:, 3:10])
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


def test_readers_are_counted_and_may_come_again() -> None:
    observation = ReaderObservation(GEOMETRY, START, END)
    reader = Reader(1, 9)
    for count in (1, 2):
        forward(observation, (reader, 0, 9))
        observation.end_reader(reader)
        assert observation.num_readers == count
    assert_saw(observation, reader, reader)


def test_attention_counts_for_the_tokens_around_it() -> None:
    observation = ReaderObservation(GEOMETRY, START, END, reach=3)
    reader = Reader(1, 9)
    forward(observation, (reader, 0, 9))
    for layer in range(2):
        squares = reader.squares(layer)
        want = torch.stack([squares[:, max(i - 3, 0) : i + 4].mean(1) for i in range(END - START)], dim=1).sqrt()
        # What is shown of a part knows what was attended to beside it.
        seen = observation.show(layer, START + 5, KEYS[layer], KEYS[layer], SLOTS[5:9])
        torch.testing.assert_close(seen.reader_attention, want[:, 5:9])


def test_before_the_first_reader_nothing_is_shown() -> None:
    seen = ReaderObservation(GEOMETRY, START, END).show(0, START, KEYS[0], KEYS[0], SLOTS)
    assert seen.reader_attention is None
