"""What the objects of the cache share."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.cache.complements import Complements
from sgl_kvevict.cache.ports import TreePort
from sgl_kvevict.cache.readers import ReaderTable
from sgl_kvevict.cache.records import PrefixTable
from sgl_kvevict.guard import Guard
from sgl_kvevict.segments.ranker import Compressor


@dataclass(frozen=True, eq=False)
class Core:
    """The tree, what is known of its nodes and their readers, and what compresses them."""

    tree: TreePort
    table: PrefixTable
    readers: ReaderTable
    compressor: Compressor
    guard: Guard
    complements: Complements
