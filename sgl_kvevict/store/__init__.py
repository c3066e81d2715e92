"""Compressed segments beyond the life of a server: their format, their names, and where they are kept."""

from sgl_kvevict.store.backend import Backend, Item
from sgl_kvevict.store.identity import Namespace, StoreIdentity
from sgl_kvevict.store.manifest import ManifestEntry
from sgl_kvevict.store.segment_file import SegmentRecord, decode_segment, encode_segment
from sgl_kvevict.store.segments import SegmentStore, describe_identity, list_segments, open_backend

__all__ = [
    "Backend",
    "Item",
    "ManifestEntry",
    "Namespace",
    "SegmentRecord",
    "SegmentStore",
    "StoreIdentity",
    "decode_segment",
    "describe_identity",
    "encode_segment",
    "list_segments",
    "open_backend",
]
