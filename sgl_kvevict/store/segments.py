"""The tier of files: segments in a folder or a service, which outlive their server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sgl_kvevict.errors import CorruptSegmentError, StoreError, UnreadableItemError, cut
from sgl_kvevict.store.backend import SMALL_BYTES, Backend, Item
from sgl_kvevict.store.directory import DirectoryBackend
from sgl_kvevict.store.identity import FORMAT_VERSION, Namespace, StoreIdentity, is_key, key_bounds
from sgl_kvevict.store.mooncake import MooncakeBackend
from sgl_kvevict.store.remote import RemoteBackend
from sgl_kvevict.store.segment_file import SegmentRecord, decode_segment, encode_segment, most_bytes
from sgl_kvevict.store.tier import IndexEntry, Tier

ROOT = f"v{FORMAT_VERSION}"
IDENTITY = "identity.json"
QUARANTINE_S = 60.0
"""An item that cannot be read is not tried again within this time."""
MAX_QUARANTINED = 4096


def open_backend(url: str, max_bytes: int | None = None) -> Backend:
    """Return the back end of a URL or folder without creating or contacting it; ``max_bytes`` limits a folder.

    ConfigError: the URL's protocol is unknown, or its package is not installed.
    """
    if url.startswith("mooncake://"):
        return MooncakeBackend(url)
    url = url.removeprefix("file://").removeprefix("local://")
    return RemoteBackend(url) if "://" in url else DirectoryBackend(Path(url), max_bytes)


@dataclass(frozen=True)
class StoredSegment:
    """A segment in a listing; ``identity``: digest of the identity that made it."""

    identity: str
    key: str
    item: Item

    @property
    def num_tokens(self) -> int:
        """Its length."""
        start, end = key_bounds(self.key)
        return end - start


class SegmentStore(Tier):
    """The segments of one identity; those of others are neither found nor loaded.

    Each name of the index is a small file that lists one segment, the newest. Writers need no lock: a file appears in
    one piece. One that is lost, hides an older segment or lists a removed one costs a look-up, until that prefix is
    computed again. (A list of segments would have to be read before it is written, and two writers would lose entries.)

    An item that cannot be read although the store answers (an I/O error, missing permission, a folder of its name) is
    quarantined: it counts as missing for ``QUARANTINE_S``.

    ``draft``: identity of the draft model; None: rows of draft models are neither written nor loaded.
    """

    def __init__(
        self,
        backend: Backend,
        identity: StoreIdentity,
        clock: Callable[[], float] = time.monotonic,
        draft: StoreIdentity | None = None,
    ) -> None:
        super().__init__(identity)
        self.backend = backend
        self._draft = draft
        self._clock = clock
        self._quarantined: dict[str, float] = {}

    def put(self, record: SegmentRecord, namespace: Namespace) -> int:
        """Write a segment, list it, return the bytes written.

        A stored segment is kept (0 bytes are written) unless only the new one is complete.

        StoreError: it cannot be written. ValueError: the record has another identity, or a key that is not of this
        namespace.
        """
        is_own = record.identity == self.identity.digest
        if not is_own or record.key != namespace.segment(record.tokens.tolist(), record.start):
            raise ValueError(f"the segment {record.key} is not of identity {self.identity.digest} and its namespace")
        # Before the first segment: `_read` takes this file to tell a damaged item from a store that does not answer.
        if not self.backend.exists(self._name(IDENTITY)):
            description = json.dumps(self.identity.describe(), indent=1, sort_keys=True)
            self.backend.put(self._name(IDENTITY), description.encode())
        entry, prefixes = IndexEntry.of(record), self._names(record, namespace)
        # The index says whether the stored segment is complete, so the large file need not be read for that.
        near = [each for entries in self._listed(prefixes[-1:]).values() for each in entries]
        stored = max((each for each in near if each.key == record.key), key=lambda each: each.is_complete, default=None)
        name, written = segment_name(self.identity.digest, record.key), 0
        is_known_complete = stored is not None and stored.is_complete
        if not self.backend.exists(name) or (entry.is_complete and not is_known_complete):
            data = encode_segment(record, "" if self._draft is None else self._draft.digest)
            self._put(name, data)
            written = len(data)
        # The file stays, so the index goes on describing that one.
        elif stored is not None:
            entry = stored
        # After the segment, so that an entry always leads to a file. Written even if the file was there: a newer
        # segment may have taken its place in the index.
        for prefix in prefixes:
            self._put(self._prefix_name(prefix), msgspec.json.encode(entry))
        return written

    def get(self, key: str) -> SegmentRecord | None:
        """Read and check a segment; None: there is none, or it is quarantined.

        Raises:
            StoreError: the store cannot be read.
            UnreadableItemError: the segment cannot be read; it is quarantined.
            CorruptSegmentError: the file is not a segment of this identity, or larger than any; it is not read whole.
        """
        draft = self._draft or self.identity  # of another server; its rows are no more than the model's
        limit = most_bytes(key, self.identity, draft)
        # One byte more tells a file that is too long from one that is just as long as allowed.
        data = self._read(segment_name(self.identity.digest, key), limit + 1)
        if data is None:
            return None
        if len(data) > limit:
            raise CorruptSegmentError(f"length: got more than {limit} bytes, which no segment of this name has")
        return decode_segment(data, key, self.identity, self._draft)

    def delete(self, key: str) -> bool:
        """Remove a segment; False: there was none. It may still be listed."""
        return self.backend.delete(segment_name(self.identity.digest, key))

    def _listed(self, names: Sequence[str]) -> Mapping[str, list[IndexEntry]]:
        """What is listed under names of prefixes; a damaged file of the index counts as missing.

        StoreError: the store cannot be read. UnreadableItemError: a file of the index cannot be; it is quarantined.
        """
        files = {self._prefix_name(name): name for name in names}
        readable = [file for file in files if not self._is_quarantined(file)]
        try:
            found = self.backend.get_many(readable)
        except StoreError:
            read = {file: self._read(file, SMALL_BYTES) for file in readable}  # says which one
            found = {file: data for file, data in read.items() if data is not None}
        listed = {}
        for file, data in found.items():
            # The next server that computes this prefix writes the entry anew.
            with suppress(CorruptSegmentError):
                listed[files[file]] = [decode_entry(data)]
        return listed

    def _put(self, name: str, data: bytes) -> None:
        self.backend.put(name, data)
        # An item that was just written is readable again.
        self._quarantined.pop(name, None)

    def _is_quarantined(self, name: str) -> bool:
        return self._clock() < self._quarantined.get(name, float("-inf"))

    def _read(self, name: str, limit: int) -> bytes | None:
        """Bytes of an item, of a larger one maybe only ``limit``; None: there is none, or it is quarantined."""
        if self._is_quarantined(name):
            return None
        try:
            return self.backend.get(name, limit)
        except StoreError as error:
            self.backend.get(self._name(IDENTITY), SMALL_BYTES)  # raises if the store as a whole cannot be read
            # To forget them costs one more attempt each; to keep them all would let a damaged disk fill the memory.
            if len(self._quarantined) >= MAX_QUARANTINED:
                self._quarantined.clear()
            self._quarantined[name] = self._clock() + QUARANTINE_S
            raise UnreadableItemError(str(error)) from error

    def _prefix_name(self, prefix: str) -> str:
        return self._name(f"prefixes/{prefix[:2]}/{prefix}")

    def _name(self, name: str) -> str:
        return f"{ROOT}/{self.identity.digest}/{name}"


def decode_entry(data: bytes) -> IndexEntry:
    """Check the bytes of a file of the index; ``CorruptSegmentError``: they are not an entry."""
    try:
        return msgspec.json.decode(data, type=IndexEntry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptSegmentError(f"prefix: {cut(str(error))}") from error


def segment_name(identity: str, key: str) -> str:
    """Name of a segment in a back end."""
    return f"{ROOT}/{identity}/segments/{key[:2]}/{key}"


def list_segments(backend: Backend) -> Iterator[StoredSegment]:
    """Yield the segments of all identities, unordered."""
    for item in backend.list(ROOT):
        parts = item.name.split("/")
        if len(parts) == 5 and parts[2] == "segments" and is_key(parts[4]):
            yield StoredSegment(parts[1], parts[4], item)


def describe_identity(backend: Backend, identity: str) -> dict[str, Any] | None:
    """Return the stored description of an identity; None: there is none."""
    data = backend.get(f"{ROOT}/{identity}/{IDENTITY}")
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None if data is None else msgspec.json.decode(data, type=dict[str, Any])
    return None
