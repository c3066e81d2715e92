"""Compressed spans as attention reads them, and which new tokens of a batch read which spans.

All implementations start from these two: numba's ``Layout`` and Triton's ``Tables`` list the tensors' addresses and add
work lists; FlashInfer gets index lists in its own format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class SpanRuns:
    """Compressed tokens of a path whose rows have one width. Immutable; compared and hashed by identity.

    Run ``(l, h)`` is ``rows[starts[l, h] : starts[l, h] + lens[l, h]]``.
    """

    # [segment_entries], int32, numbers of rows of ``bits`` bits (row_codec.py): of the whole segment, shared by all
    # spans cut from it
    rows: Tensor
    starts: Tensor  # [num_layers, num_kv_heads], int32, first entry of each run
    lens: Tensor  # [num_layers, num_kv_heads], int32, entries of each run; may be 0
    num_tokens: int  # logical tokens that were compressed into the span: no run is longer
    positions: Tensor  # [segment_entries], int32, logical position of each entry's token, ascending within a run
    bits: int = 16  # width of a number in a row: 16 (as the pool stores it) or 4


class SpanReaders:
    """Which new tokens of a batch read which spans.

    Args:
        paths: per request, its spans, root first, each once.
        rows: per request, rows of its new tokens; empty: another implementation attends for them.

    Attributes:
        spans: spans of all paths, each once.
        rows: per span, the rows that read it, request after request.
        path_start: [num_requests + 1], start of each request in ``path_span`` and ``path_place``.
        path_span: span numbers of each request, root first.
        path_place: index of the request's first row among the rows of that span.
    """

    def __init__(self, paths: Sequence[Sequence[SpanRuns]], rows: Sequence[range]) -> None:
        # By identity: two spans with the same numbers are still different memory.
        number_of = {span: i for i, span in enumerate(dict.fromkeys(span for path in paths for span in path))}
        self.spans = list(number_of)
        self.rows: list[list[int]] = [[] for _ in self.spans]
        self.path_start, self.path_span, self.path_place = [0], list[int](), list[int]()
        for path, own in zip(paths, rows, strict=True):
            for span in path:
                readers = self.rows[number_of[span]]
                self.path_span.append(number_of[span])
                self.path_place.append(len(readers))
                readers.extend(own)
            self.path_start.append(len(self.path_span))


def compressed_len_of(path: Iterable[SpanRuns]) -> int:
    """Tokens that were compressed into the spans of a path; every later token has a token slot of its own."""
    return sum(span.num_tokens for span in path)
