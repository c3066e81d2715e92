"""Tiers outside the pool, the host's memory and files: how segments are found there, their format, and back ends."""

from sgl_kvevict.store.backend import Backend
from sgl_kvevict.store.identity import Namespace, StoreIdentity
from sgl_kvevict.store.reader import Fetch, ReadAhead
from sgl_kvevict.store.segment_file import SegmentRecord
from sgl_kvevict.store.segments import SegmentStore, describe_identity, list_segments, open_backend
from sgl_kvevict.store.tier import Lookup
from sgl_kvevict.store.writer import WriteBehind

__all__ = [
    "Backend",
    "Fetch",
    "Lookup",
    "Namespace",
    "ReadAhead",
    "SegmentRecord",
    "SegmentStore",
    "StoreIdentity",
    "WriteBehind",
    "describe_identity",
    "list_segments",
    "open_backend",
]
