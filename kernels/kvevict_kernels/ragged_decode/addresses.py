"""The addresses of a batch's tables.

Kernels get one pointer, to a list of addresses, instead of one pointer per table. A captured launch keeps that pointer;
once another batch's addresses are copied there, a replay reads that batch's tables, of any size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvevict_kernels.ragged_decode.host_lists import NUM_CLASSES
from kvevict_kernels.ragged_decode.tables import Tables
from kvevict_kernels.transfer import to_device

BATCH_FIELDS = (
    *("run_address", "run_lens", "run_chunks", "partial_start", "span_members", "span_member_start", "span_bits"),
    *("members", "request_members", "new_lens_device", "compressed_lens", "request_chunk", "suffix_partial"),
    *("path_start", "path_span", "path_member", "merge_request", "merge_token"),
    *("span_positions", "member_request", "row_ends"),
    *("tile_request", "tile_index", "tile_split", "tile_share", "tile_shares", "num_splits", "extend_partial"),
)
"""Attributes of :class:`Tables`, in the order of the list; kernels name them in capitals (``triton_addresses.py``)."""
CLASS_FIELDS = ("items", "item_count", "requests", "max_items")
"""Attributes of :class:`ClassTables`, listed next, once per class; ``max_items`` is a number."""
LAST_FIELDS = ("partial_out", "partial_lse", "num_spans")
"""The scratch, and a number."""
NUM_ADDRESSES = len(BATCH_FIELDS) + NUM_CLASSES * len(CLASS_FIELDS) + len(LAST_FIELDS)


@dataclass(frozen=True, eq=False)
class TableAddresses:
    """The list through which kernels find a batch's tables."""

    tables: Tables  # also size the launches
    # scratch, [>= tables.num_partials, v_head_dim] and [>= tables.num_partials], float32; layers and forwards that run
    # one after the other may share it
    partials: tuple[Tensor, Tensor]
    on_device: Tensor  # [NUM_ADDRESSES], int64, the list
    # launches are recorded, and replayed when ``on_device`` lists another batch of as many requests with as many new
    # tokens: the sizes of the launches depend on nothing else
    is_captured: bool = False

    @classmethod
    def of(cls, tables: Tables, partials: tuple[Tensor, Tensor]) -> TableAddresses:
        """List the addresses of tables and scratch: one small asynchronous copy to the device."""
        device = tables.compressed_lens.device
        found = [getattr(tables, name) for name in BATCH_FIELDS]
        found += [getattr(class_tables, name) for class_tables in tables.classes for name in CLASS_FIELDS]
        found += [*partials, tables.num_spans]
        words = [x.data_ptr() if isinstance(x, Tensor) else x for x in found]
        return cls(tables, partials, to_device(torch.tensor(words, dtype=torch.int64), device))

    def captured_at(self, place: Tensor) -> TableAddresses:
        """Copy the list to a place that outlives the batch, for launches that are about to be recorded."""
        place.copy_(self.on_device)
        return replace(self, on_device=place, is_captured=True)

    def has_work(self, which: int) -> bool:
        """Whether a class of the split kernel has work, or may have some when a recorded launch is replayed."""
        class_tables = self.tables.classes[which]
        if class_tables.max_items + class_tables.max_suffix_items:
            return True
        # A replayed batch may share its spans in another way: any class counts that so many rows could fall into.
        most_rows = self.tables.num_new * self.tables.sizes.group_size
        return self.is_captured and (which == 0 or most_rows > self.tables.sizes.decode_rows[which - 1])
