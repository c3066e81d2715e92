"""The persistent store of compressed segments: their format, their names, and back ends."""

from sgl_kvevict.store.backend import Backend, Item
from sgl_kvevict.store.identity import Namespace, StoreIdentity
from sgl_kvevict.store.manifest import ManifestEntry
from sgl_kvevict.store.reader import Fetch, ReadAhead, Wanted, segments_of
from sgl_kvevict.store.segment_file import SegmentRecord, decode_segment, encode_segment
from sgl_kvevict.store.segments import SegmentStore, describe_identity, list_segments, open_backend
from sgl_kvevict.store.writer import WriteBehind

__all__ = [
    "Backend",
    "Fetch",
    "Item",
    "ManifestEntry",
    "Namespace",
    "ReadAhead",
    "SegmentRecord",
    "SegmentStore",
    "StoreIdentity",
    "Wanted",
    "WriteBehind",
    "decode_segment",
    "describe_identity",
    "encode_segment",
    "list_segments",
    "open_backend",
    "segments_of",
]
