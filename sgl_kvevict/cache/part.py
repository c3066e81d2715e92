"""Objects that all parts of the life cycle share."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.cache.ports import TreePort
from sgl_kvevict.cache.readers import ReaderTable
from sgl_kvevict.cache.records import PrefixTable
from sgl_kvevict.guard import Guard
from sgl_kvevict.segments import Compressor, SegmentPacker


@dataclass(frozen=True)
class Shared:
    """The objects that all parts work on. ``guard`` holds errors that concern one request or job."""

    tree: TreePort
    table: PrefixTable
    readers: ReaderTable
    packer: SegmentPacker
    compressor: Compressor
    guard: Guard


class Part:
    """A part of the life cycle. Its further arguments are parts of lower layers; it knows none above."""

    def __init__(self, shared: Shared) -> None:
        self._tree = shared.tree
        self._table = shared.table
        self._spans = shared.table.spans
        self._readers = shared.readers
        self._packer = shared.packer
        self._compressor = shared.compressor
        self._config = shared.compressor.config
        self._guard = shared.guard
