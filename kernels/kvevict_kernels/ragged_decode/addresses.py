"""The tables of a batch, found by address.

The decode kernels get one pointer, to a list of addresses, instead of a pointer to every table. A captured launch keeps
that pointer, so a later replay reads the tables of another batch, of any size, once their addresses are copied there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvevict_kernels.ragged_decode.host_lists import NUM_CLASSES
from kvevict_kernels.ragged_decode.tables import Tables
from kvevict_kernels.ragged_decode.tile_table import DECODE_ROWS
from kvevict_kernels.transfer import to_device

BATCH_FIELDS = (
    *("run_address", "run_lens", "partial_start", "span_members", "span_member_start", "span_chunk", "span_cap"),
    *("members", "request_members", "new_lens_device", "waterlines", "request_chunk", "suffix_partial"),
    *("path_start", "path_span", "path_member", "merge_request", "merge_token"),
    *("span_positions", "member_request", "row_ends"),
)
"""Attributes of :class:`Tables`, in the order of the list."""
CLASS_FIELDS = ("work_unit", "item_start", "item_count", "requests")
"""Attributes of :class:`ClassTables`; behind the above, once per class."""
CLASS_SIZE = len(CLASS_FIELDS) + 1
"""With ``max_items``, a number, behind them."""
PARTIAL_OUT = len(BATCH_FIELDS) + NUM_CLASSES * CLASS_SIZE
PARTIAL_LSE = PARTIAL_OUT + 1
NUM_SPANS = PARTIAL_OUT + 2
"""A number too."""
NUM_ADDRESSES = PARTIAL_OUT + 3


@dataclass(frozen=True, eq=False)
class TableAddresses:
    """Where the decode kernels find what a batch reads.

    Attributes:
        tables: of the batch; also what sizes the launches.
        partials: scratch, [>= tables.num_partials, head_dim] and [>= tables.num_partials], float32; held, because
            the kernels find it by address.
        on_device: [NUM_ADDRESSES], int64, the list.
        is_captured: launches are recorded, and repeated when ``on_device`` lists another batch of as many requests
            with one new token each: their sizes depend on nothing else.
    """

    tables: Tables
    partials: tuple[Tensor, Tensor]
    on_device: Tensor
    is_captured: bool = False

    @classmethod
    def of(cls, tables: Tables, partials: tuple[Tensor, Tensor]) -> TableAddresses:
        """List the addresses of tables and scratch: one small copy to the device, without waiting for it."""
        found = [getattr(tables, name).data_ptr() for name in BATCH_FIELDS]
        for class_tables in tables.classes:
            found += [getattr(class_tables, name).data_ptr() for name in CLASS_FIELDS]
            found.append(class_tables.max_items)
        found += [partials[0].data_ptr(), partials[1].data_ptr(), tables.num_spans]
        return cls(tables, partials, to_device(torch.tensor(found, dtype=torch.int64), partials[0].device))

    def captured_at(self, place: Tensor) -> TableAddresses:
        """List the batch at a place that outlives it, for launches that are about to be recorded."""
        place.copy_(self.on_device)
        return replace(self, on_device=place, is_captured=True)

    @property
    def class_indices(self) -> list[int]:
        """Classes of the split kernel that have work, or may have some when a recorded launch is repeated."""
        return [which for which in range(NUM_CLASSES) if self._has_work(which)]

    def _has_work(self, which: int) -> bool:
        class_tables = self.tables.classes[which]
        if class_tables.max_items + class_tables.max_suffix_items:
            return True
        most_rows = len(self.tables.new_lens) * self.tables.sizes.group_size
        return self.is_captured and (which == 0 or most_rows > DECODE_ROWS[which - 1])
