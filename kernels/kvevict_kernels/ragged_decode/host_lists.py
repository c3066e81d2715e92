"""A batch's lists that depend only on paths, numbers of new tokens and bounds of suffixes, computed on the host."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from kvevict_kernels.ragged_decode.chunks import (
    ITEMS_PER_SM,
    MIN_CHUNKS,
    extend_splits,
    max_chunks,
    most_splits,
    span_chunk,
    suffix_splits,
)
from kvevict_kernels.ragged_decode.tile_table import EXTEND
from kvevict_kernels.row_sizes import WIDTHS
from kvevict_kernels.span_runs import SpanReaders, SpanRuns, compressed_len_of

SPLIT_ROWS = 128
"""Requests with more q rows per KV head are left to ``ragged_extend``."""
NUM_CLASSES = EXTEND
LARGE_ROWS = 128
"""Q rows of a tile of which one program is resident on a multiprocessor (compiled)."""


def uses_split(new_len: int, group_size: int) -> bool:
    """Whether the split kernel attends for a request's new tokens (else ``ragged_extend``)."""
    return new_len == 1 or new_len * group_size <= SPLIT_ROWS


def row_class(num_rows: int, sizes: Sizes) -> int:
    """Class of a unit with ``num_rows`` q rows."""
    return int(num_rows > sizes.decode_rows[0])


@dataclass(frozen=True)
class Sizes:
    """Sizes that all batches of a server share."""

    num_layers: int
    num_kv_heads: int
    group_size: int  # q heads per KV head
    num_sms: int  # multiprocessors of the device
    decode_rows: tuple[int, int]  # q rows per tile of the split kernel, by class
    extend_rows: int  # the same of ``ragged_extend``
    has_windows: bool = False  # some layers have a sliding window

    @property
    def num_items(self) -> int:
        """Work items into which a suffix, or a span with few readers, is cut, if it is long enough."""
        return ITEMS_PER_SM * self.num_sms

    def num_resident(self, which: int) -> int:
        """Work items of a class that a device works at side by side: a tile of 128 q rows takes a multiprocessor."""
        return self.num_items if self.decode_rows[which] < LARGE_ROWS else self.num_sms


class HostLists:
    """The lists of one batch; arguments as for :func:`kvevict_kernels.ragged_decode.launch.plan_batch`."""

    def __init__(
        self,
        paths: Sequence[Sequence[SpanRuns]],
        new_lens: Sequence[int],
        suffix_bounds: Sequence[int],
        sizes: Sizes,
        elsewhere: Collection[int] = (),
    ) -> None:
        self.paths = paths
        self.new_lens = new_lens
        self.suffix_bounds = suffix_bounds
        self.sizes = sizes
        self.elsewhere = set(elsewhere)
        self.group_size = sizes.group_size
        self.is_split = [uses_split(new, self.group_size) for new in new_lens]
        ends = list(accumulate(new_lens))
        self.first_rows = [end - new for end, new in zip(ends, new_lens, strict=True)]
        rows = zip(self.first_rows, ends, self.is_split, strict=True)
        self.readers = SpanReaders(paths, [range(first, end if is_split else first) for first, end, is_split in rows])
        self.spans, self.span_rows = self.readers.spans, self.readers.rows
        self.span_class = [row_class(len(rows) * self.group_size, sizes) for rows in self.span_rows]
        self.request_class = [row_class(new * self.group_size, sizes) for new in new_lens]
        averages = [self._average(span) for span in self.spans]
        self.span_tiles = [
            -(-len(rows) * self.group_size // sizes.decode_rows[which])
            for rows, which in zip(self.span_rows, self.span_class, strict=True)
        ]
        self.span_chunk = [
            span_chunk(average * sizes.num_kv_heads, sizes.num_kv_heads, sizes.num_resident(which), which, num_tiles)
            for average, which, num_tiles in zip(averages, self.span_class, self.span_tiles, strict=True)
        ]
        self.span_cap = [max_chunks(*both) for both in zip(averages, self.span_chunk, strict=True)]
        self.shares = [self._shares(i) for i in range(len(new_lens))]
        self.num_splits = [sum(shares.values()) for shares in self.shares]
        # The larger of both: partials of `ragged_extend` overwrite the others, which are merged by then.
        self.num_partials = max(self._place_partials(), self._place_extend_partials())

    def _average(self, span: SpanRuns) -> int:
        """Entries of a run, on average over the segment that the span was cut from."""
        runs = self.sizes.num_layers * self.sizes.num_kv_heads
        # How many of the segment's rows are the span's only the device knows.
        return min(-(-span.rows.numel() // runs), span.num_tokens)

    def _shares(self, request: int) -> dict[int, int]:
        """Parts of the keys of a request that ``ragged_extend`` attends for, by bits, from its own lengths alone."""
        if self.is_split[request] or request in self.elsewhere:
            return {}
        tiles = self._num_tiles(request) * self.sizes.num_kv_heads
        keys = {WIDTHS[0]: self.suffix_bounds[request]}
        for span in self.paths[request]:
            keys[span.bits] = keys.get(span.bits, 0) + self._average(span)
        return {bits: extend_splits(tiles, keys[bits], self.sizes.num_sms) for bits in WIDTHS if bits in keys}

    def _num_tiles(self, request: int) -> int:
        return -(-self.new_lens[request] * self.group_size // self.sizes.extend_rows)

    def _place_partials(self) -> int:
        """Partials of a layer: a bound for its spans, then the suffixes one after the other."""
        sizes = self.sizes
        total = sum(self._max_chunks(span) * len(rows) * self.group_size for span, rows in enumerate(self.span_rows))
        self.suffix_partial = []
        for request, (bound, which) in enumerate(zip(self.suffix_bounds, self.request_class, strict=True)):
            self.suffix_partial.append(total)
            if self.is_split[request]:
                splits = suffix_splits(bound, sizes.num_kv_heads, sizes.num_items, which)
                total += splits * sizes.num_kv_heads * self.new_lens[request] * self.group_size
        return total

    def _place_extend_partials(self) -> int:
        """Partials of ``ragged_extend``; they overwrite the split kernel's, which are merged by then."""
        total = 0
        self.extend_partial = []
        for new, splits in zip(self.new_lens, self.num_splits, strict=True):
            self.extend_partial.append(total)
            if splits > 1:
                total += splits * self.sizes.num_kv_heads * new * self.group_size
        return total

    def _max_chunks(self, span: int) -> int:
        """Maximum number of chunks of a span in one layer."""
        longest = -(-self.spans[span].num_tokens // self.span_chunk[span])
        return self.sizes.num_kv_heads * min(self.span_cap[span], longest)

    def max_items(self, which: int) -> int:
        """Maximum number of work items of a class's spans in one layer."""
        return sum(
            self._max_chunks(span) * num_tiles
            for span, num_tiles in enumerate(self.span_tiles)
            if self.span_class[span] == which
        )

    def requests_of(self, which: int) -> list[int]:
        """Requests whose suffixes are in a class."""
        return [i for i, mine in enumerate(self.request_class) if mine == which and self.is_split[i]]

    def max_suffix_items(self, which: int) -> int:
        """Maximum number of work items of a class's suffixes, however long; sizes a captured step."""
        sizes = self.sizes
        splits = most_splits(sizes.num_kv_heads, sizes.num_items)
        tiles = (-(-self.new_lens[i] * self.group_size // sizes.decode_rows[which]) for i in self.requests_of(which))
        return splits * sizes.num_kv_heads * sum(tiles)

    def addresses(self) -> dict[str, list[int]]:
        """Lists of 64-bit numbers."""
        return {
            "span_address": [span.rows.data_ptr() for span in self.spans],
            "span_starts": [span.starts.data_ptr() for span in self.spans],
            "span_lens": [span.lens.data_ptr() for span in self.spans],
            # Kernels add these bytes to the address of an entry's row number.
            "span_positions": [span.positions.data_ptr() - span.rows.data_ptr() for span in self.spans],
            "suffix_partial": self.suffix_partial,
            "extend_partial": self.extend_partial,
        }

    def lists(self) -> dict[str, list[int]]:
        """Lists of 32-bit numbers."""
        members = [row for rows in self.span_rows for row in rows]
        num_rows = [len(rows) for rows in self.span_rows]
        merged = [
            (request, token)
            for request, new in enumerate(self.new_lens)
            if self.is_split[request]
            for token in range(new)
        ]
        tiles = [tile for bits in WIDTHS for tile in self._extend_tiles(bits)]
        request_of = [i for i, new in enumerate(self.new_lens) for _ in range(new)] if self.sizes.has_windows else []
        return {
            "span_members": num_rows,
            "span_member_start": list(accumulate(num_rows, initial=0))[:-1],
            "span_class": self.span_class,
            "span_chunk": self.span_chunk,
            "span_cap": self.span_cap,
            "span_bits": [span.bits for span in self.spans],
            "members": members + list(range(sum(self.new_lens))),
            "member_request": [request_of[row] for row in members] if self.sizes.has_windows else [],
            "row_ends": list(accumulate(self.new_lens)) if self.sizes.has_windows else [],
            "request_members": [len(members) + row for row in self.first_rows],
            "new_lens_device": list(self.new_lens),
            "compressed_lens": [compressed_len_of(path) for path in self.paths],
            "request_chunk": [MIN_CHUNKS[which] for which in self.request_class],
            "num_splits": self.num_splits,
            "path_start": self.readers.path_start,
            "path_span": self.readers.path_span,
            "path_member": self.readers.path_place,
            "merge_request": [request for request, _ in merged],
            "merge_token": [token for _, token in merged],
            "tile_request": [tile.request for tile in tiles],
            "tile_index": [tile.place for tile in tiles],
            "tile_split": [tile.split for tile in tiles],
            "tile_share": [tile.share for tile in tiles],
            "tile_shares": [tile.shares for tile in tiles],
            **{f"requests_{which}": self.requests_of(which) for which in range(NUM_CLASSES)},
        }

    def tile_counts(self) -> dict[int, int]:
        """Programs of ``ragged_extend`` per KV head, by the bits of their keys."""
        return {bits: len(self._extend_tiles(bits)) for bits in WIDTHS}

    def _extend_tiles(self, bits: int) -> list[_Tile]:
        """Every program of ``ragged_extend`` for keys of so many bits; last tiles see the most keys and go first."""
        return [
            _Tile(request, index, self._first_split(request, bits) + share, share, shares[bits])
            for request, shares in enumerate(self.shares)
            if bits in shares
            for index in reversed(range(self._num_tiles(request)))
            for share in range(shares[bits])
        ]

    def _first_split(self, request: int, bits: int) -> int:
        return sum(count for width, count in self.shares[request].items() if width > bits)


class _Tile(NamedTuple):
    """A program of ``ragged_extend``."""

    request: int
    place: int  # among the request's tiles of q rows
    split: int  # part of its keys
    share: int  # place of the part among those of its number of bits
    shares: int  # parts of that number of bits
