from __future__ import annotations

import torch

from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention.flashinfer.lists import SpanGroup, group_spans, join_runs
from sgl_kvevict.geometry import KVGeometry

GEOMETRY = KVGeometry(num_layers=2, num_qo_heads=4, num_kv_heads=2, head_dim=8, num_token_slots=100)


def span(head_slots: torch.Tensor, first: int, lens: list[list[int]]) -> SpanRuns:
    """A span cut from a segment: runs one after the other from ``first``."""
    run_lens = torch.tensor(lens, dtype=torch.int32)
    starts = first + run_lens.flatten().cumsum(0).view(2, 2) - run_lens
    return SpanRuns(head_slots, starts.int(), run_lens, 5, head_slots)


SEGMENT = torch.arange(100, 120, dtype=torch.int32)
A = span(SEGMENT, 0, [[2, 1], [0, 3]])
B = span(SEGMENT, 6, [[1, 1], [2, 0]])
C = span(torch.arange(50, 60, dtype=torch.int32), 0, [[0, 2], [1, 1]])


def test_spans_are_grouped_by_their_readers() -> None:
    """Depth does not matter, and equal contents are not the same span."""
    twin = SpanRuns(A.rows, A.starts, A.lens, A.num_tokens, A.positions)
    groups = group_spans([(A, B), (), (C, B, A), (twin,)])
    assert groups == [SpanGroup((0, 2), (A, B)), SpanGroup((2,), (C,)), SpanGroup((3,), (twin,))]


def test_joined_runs_by_hand() -> None:
    lens, head_slots = join_runs([SpanGroup((0, 2), (A, C)), SpanGroup((1,), (B,))], GEOMETRY)
    expected = [[100, 101], [102, 50, 51], [106], [107], [52], [103, 104, 105, 53], [108, 109], []]
    assert lens.shape == (2, 4)
    assert lens.flatten().tolist() == [len(run) for run in expected]
    assert head_slots.tolist() == [slot for run in expected for slot in run]
