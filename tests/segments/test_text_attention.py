"""What repetitions pay the tokens of a text, summed over chunks and requests."""

from __future__ import annotations

import torch
from torch import Tensor

from helpers.references import accumulated_attention_reference
from helpers.statistics import normal
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.segments.text_attention import TextAttention

NUM_TOKENS = 20
GEOMETRY = KVGeometry(num_layers=2, num_qo_heads=6, num_kv_heads=3, head_dim=16, num_token_slots=60)
SLOTS = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:NUM_TOKENS]


KEYS = [normal(layer, 60, 3, 16) for layer in range(2)]


class Reader:
    """Queries after the text; [layer][token]."""

    def __init__(self, seed: int, num_queries: int) -> None:
        self.queries = [normal(seed * 10 + layer, num_queries, 6, 16) for layer in range(2)]
        self.lse = [3.0 + normal(seed * 10 + layer + 5, num_queries, 6) for layer in range(2)]

    def squares(self, layer: int) -> Tensor:
        queries, lse = self.queries[layer], self.lse[layer]
        where = {"sm_scale": 0.25, "key_start": 0, "query_start": NUM_TOKENS, "reduction": "squares"}
        return accumulated_attention_reference(queries, lse, KEYS[layer], SLOTS, **where)


def read(attention: TextAttention, reader: Reader, first: int, last: int, start: int = NUM_TOKENS) -> None:
    """One forward over a chunk of a reader, whose first query lies at ``start``."""
    attention.begin_chunk(start + first, SLOTS)
    for layer in range(2):
        attention.record(layer, reader.queries[layer][first:last], reader.lse[layer][first:last], KEYS[layer], 0.25)


def test_chunks_and_readers_add_up() -> None:
    attention, first, second = TextAttention(GEOMETRY, NUM_TOKENS, SLOTS.device), Reader(1, 9), Reader(2, 5)
    read(attention, first, 0, 4)
    read(attention, first, 4, 9)
    read(attention, second, 0, 5)
    for layer in range(2):
        torch.testing.assert_close(attention.sums[layer], first.squares(layer) + second.squares(layer))


def test_queries_of_the_text_itself_do_not_count() -> None:
    """It is not cached any more, and computed again by the request that repeats it."""
    attention, reader = TextAttention(GEOMETRY, NUM_TOKENS, SLOTS.device), Reader(1, 9)
    before = [torch.cat([normal(7, 3, 6, 16), queries]) for queries in reader.queries]
    lse = [torch.cat([normal(8, 3, 6), each]) for each in reader.lse]
    attention.begin_chunk(NUM_TOKENS - 3, SLOTS)
    for layer in range(2):
        attention.record(layer, before[layer], lse[layer], KEYS[layer], 0.25)
        torch.testing.assert_close(attention.sums[layer], reader.squares(layer))


def test_layers_with_windows_are_skipped() -> None:
    windows = KVGeometry(2, 6, 3, 16, 60, windows=(0, 8))
    attention = TextAttention(windows, NUM_TOKENS, SLOTS.device)
    read(attention, Reader(1, 9), 0, 9)
    assert attention.sums[0].gt(0).all() and not attention.sums[1].any()
