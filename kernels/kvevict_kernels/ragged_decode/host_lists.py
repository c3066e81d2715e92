"""What follows from paths and numbers of new tokens alone, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from torch import Tensor

ROW_TILES = (16, 64)
"""Q rows per tile of the kernel, by class: decode rows that read alone; many sharers, or several new tokens."""
CHUNKS = (512, 1024)
"""KV rows per work item, by class. Fixed: results do not depend on what else is in the batch."""
MAX_SPLITS = 32
"""A longer suffix is cut into so many chunks, each a multiple of its class's chunk."""
SPLIT_ROWS = 128
"""A request with more q rows per KV head than this is left to ``ragged_extend``."""
EXTEND_TILE = 128
"""Q rows per tile of ``ragged_extend``."""


class RunLists(Protocol):
    """One compressed span: run ``(l, h)`` is ``head_slots[starts[l, h] : starts[l, h] + lens[l, h]]``."""

    @property
    def head_slots(self) -> Tensor:
        """[num_entries], int32."""

    @property
    def starts(self) -> Tensor:
        """[num_layers, num_kv_heads], int32."""

    @property
    def lens(self) -> Tensor:
        """[num_layers, num_kv_heads], int32, at most ``num_tokens`` each."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the span stands for."""


def uses_split(new_len: int, group_size: int) -> bool:
    """Whether a request's new tokens are attended for by the split kernel (else by ``ragged_extend``)."""
    return new_len == 1 or new_len * group_size <= SPLIT_ROWS


def row_class(num_rows: int) -> int:
    """Class of a unit with so many q rows."""
    return int(num_rows > ROW_TILES[0])


class HostLists:
    """The lists that follow from paths and numbers of new tokens alone."""

    def __init__(
        self,
        paths: Sequence[Sequence[RunLists]],
        new_lens: Sequence[int],
        num_kv_heads: int,
        group_size: int,
    ) -> None:
        self.paths = paths
        self.new_lens = new_lens
        self.num_kv_heads = num_kv_heads
        self.group_size = group_size
        self.is_split = [uses_split(new, group_size) for new in new_lens]
        self.spans: list[RunLists] = list({id(span): span for path in paths for span in path}.values())
        self.span_rows = self._readers()
        self.span_class = [row_class(len(rows) * group_size) for rows in self.span_rows]
        self.request_class = [row_class(new * group_size) for new in new_lens]
        self.num_partials = self._place_partials()

    def _readers(self) -> list[list[int]]:
        """Rows of the new tokens that read each span; remembers each request's place among them."""
        index = {id(span): i for i, span in enumerate(self.spans)}
        rows: list[list[int]] = [[] for _ in self.spans]
        self.first_rows: list[int] = []
        self.path_start, self.path_span, self.path_member = [0], [], []
        row = 0
        for path, new, is_split in zip(self.paths, self.new_lens, self.is_split, strict=True):
            self.first_rows.append(row)
            for span in path:
                i = index[id(span)]
                self.path_span.append(i)
                self.path_member.append(len(rows[i]))
                if is_split:
                    rows[i].extend(range(row, row + new))
            self.path_start.append(len(self.path_span))
            row += new
        return rows

    def _place_partials(self) -> int:
        """Bounds of what a layer's spans need, then the suffixes one after the other."""
        total = 0
        for span, rows, which in zip(self.spans, self.span_rows, self.span_class, strict=True):
            total += self._max_chunks_of_layer(span, CHUNKS[which]) * len(rows) * self.group_size
        self.suffix_partial = []
        for new, is_split in zip(self.new_lens, self.is_split, strict=True):
            self.suffix_partial.append(total)
            total += MAX_SPLITS * self.num_kv_heads * new * self.group_size if is_split else 0
        return total

    def _max_chunks_of_layer(self, span: RunLists, chunk: int) -> int:
        entries = min(span.head_slots.numel(), self.num_kv_heads * span.num_tokens)
        return entries // chunk + self.num_kv_heads

    def max_items(self, which: int, num_layers: int) -> tuple[int, int]:
        """Work items of a class's spans, at most: in all layers, in one."""
        in_all, in_one = 0, 0
        for span, rows, mine in zip(self.spans, self.span_rows, self.span_class, strict=True):
            if mine != which or not rows:
                continue
            tiles = -(-len(rows) * self.group_size // ROW_TILES[which])
            in_all += (span.head_slots.numel() // CHUNKS[which] + num_layers * self.num_kv_heads) * tiles
            in_one += self._max_chunks_of_layer(span, CHUNKS[which]) * tiles
        return in_all, in_one

    def requests_of(self, which: int) -> list[int]:
        """Requests whose suffixes are in a class."""
        return [i for i, mine in enumerate(self.request_class) if mine == which and self.is_split[i]]

    def max_suffix_items(self, which: int) -> int:
        """Work items of a class's suffixes, at most."""
        rows = (self.new_lens[i] * self.group_size for i in self.requests_of(which))
        return sum(MAX_SPLITS * self.num_kv_heads * -(-count // ROW_TILES[which]) for count in rows)

    def lists(self) -> dict[str, list[int]]:
        """Everything that goes to the device."""
        members = [row for rows in self.span_rows for row in rows]
        num_rows = [len(rows) for rows in self.span_rows]
        starts = list(accumulate(num_rows, initial=0))[:-1]
        tiles = [
            (request, tile)
            for request, new in enumerate(self.new_lens)
            if not self.is_split[request]
            # The last tiles see the most keys: they start first.
            for tile in reversed(range(-(-new * self.group_size // EXTEND_TILE)))
        ]
        merged = [
            (request, token)
            for request, new in enumerate(self.new_lens)
            if self.is_split[request]
            for token in range(new)
        ]
        return {
            "span_address": [span.head_slots.data_ptr() for span in self.spans],
            "suffix_partial": self.suffix_partial,
            "span_members": num_rows,
            "span_member_start": starts,
            "span_class": self.span_class,
            "span_chunk": [CHUNKS[which] for which in self.span_class],
            "members": members + list(range(sum(self.new_lens))),
            "request_members": [len(members) + row for row in self.first_rows],
            "new_lens_device": list(self.new_lens),
            "waterlines": [sum(span.num_tokens for span in path) for path in self.paths],
            "request_chunk": [CHUNKS[which] for which in self.request_class],
            "path_start": self.path_start,
            "path_span": self.path_span,
            "path_member": self.path_member,
            "merge_request": [request for request, _ in merged],
            "merge_token": [token for _, token in merged],
            "tile_request": [request for request, _ in tiles],
            "tile_index": [tile for _, tile in tiles],
            **{f"requests_{which}": self.requests_of(which) for which in range(len(ROW_TILES))},
        }
