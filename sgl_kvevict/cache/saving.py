"""Saves prefixes: copies segments at the budget from the pool and hands them to the store's writer."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

import torch

from sgl_kvevict.cache.core import Core
from sgl_kvevict.cache.export import export_segment
from sgl_kvevict.cache.nodes import Node, namespace_of
from sgl_kvevict.guard import Place
from sgl_kvevict.store.reader import ReadAhead
from sgl_kvevict.store.segment_file import SegmentRecord
from sgl_kvevict.store.segments import SegmentStore
from sgl_kvevict.store.writer import WriteBehind

logger = logging.getLogger(__name__)

SHUTDOWN_S = 10.0
"""Time limit for pending writes at shutdown; SGLang kills a scheduler after 15 s."""


@dataclasses.dataclass
class StoreAccess:
    """The store as one server uses it.

    Attributes:
        reader: None: nothing is loaded.
        is_on: False once the weights have changed: the identity is that of the files.
    """

    segments: SegmentStore
    writer: WriteBehind
    reader: ReadAhead | None = None
    is_on: bool = True

    def close(self) -> None:
        """Write what waits, in at most ``SHUTDOWN_S`` seconds."""
        began = time.monotonic()
        left = self.writer.close(SHUTDOWN_S)
        if left:
            logger.warning("kvevict: %d prefixes were not written to the store within %.0f s", left, SHUTDOWN_S)
        else:
            logger.info("kvevict: the store has all that was to be written, after %.1f s", time.monotonic() - began)


class Saving:
    """Hands segments that have reached the budget to the store, with what was evicted if ``store_complete`` says so."""

    def __init__(self, core: Core, access: StoreAccess) -> None:
        self._tree, self._table, self._spans, self._guard = core.tree, core.table, core.table.spans, core.guard
        self._packer, self._access = core.compressor.packer, access
        self._complements = core.complements if core.compressor.config.store_complete else None

    def at_budget(self, last: Node) -> None:
        """Copy the segment whose last span the node ``last`` holds, and hand it to the writer.

        Waits only for small reads from the device, and only if a part of an earlier segment is copied with it. What a
        LoRA adapter computed is not stored: an adapter's id says nothing about its weights.
        """
        if not self._access.is_on or self._tree.adapter_of(namespace_of(last)) is not None:
            return
        with self._guard.at(Place.STORE):
            writer, packer, spans = self._access.writer, self._packer, self._spans
            segment = spans[last].segment
            complements = self._complements
            num_evicted = 0 if complements is None else complements.num_bytes(segment)
            # Asked before the copy is made: it takes memory of the device, and would be dropped at once.
            if not writer.has_room(packer.bytes_of(segment) + num_evicted):
                self._table.totals.not_stored += 1
                return
            identity = self._access.segments.identity
            record = export_segment(last, spans, packer, identity, complements)
            if record is not None:
                num_bytes = sum(part.nbytes for part in record.tensors.values())
                writer.write(on_host(record), identity.namespace(*namespace_of(last)), num_bytes)

    def between_steps(self) -> None:
        """Count the results of writes since the last call."""
        totals, done = self._table.totals, self._access.writer.done
        while done:
            num_bytes = done.popleft()
            totals.not_stored += num_bytes is None
            totals.already_stored += num_bytes == 0
            totals.stored_segments += bool(num_bytes)
            totals.stored_bytes += num_bytes or 0


def on_host(record: SegmentRecord) -> Callable[[], SegmentRecord]:
    """What returns a copy in the host's memory; called by another thread, because it waits for the device."""
    device = record.kept.rows.k.device
    if device.type != "cuda":
        return lambda: record
    launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
    # The writer's thread waits for this, and not for all that the device has to do.
    launched.record()

    def moved() -> SegmentRecord:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_event(launched)
        with torch.cuda.stream(stream):
            return record.with_tensors({name: part.cpu() for name, part in record.tensors.items()})

    return moved
