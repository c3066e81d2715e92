"""Segments in a store, found by key, or by a prompt's first tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_kvevict.errors import CorruptSegmentError, StoreError, UnreadableItemError
from sgl_kvevict.store.backend import Backend, Item
from sgl_kvevict.store.directory import DirectoryBackend
from sgl_kvevict.store.identity import FORMAT_VERSION, Namespace, StoreIdentity
from sgl_kvevict.store.manifest import MAX_ENTRIES, ManifestEntry, decode_manifest, merge_manifest
from sgl_kvevict.store.mooncake import MooncakeBackend
from sgl_kvevict.store.remote import RemoteBackend
from sgl_kvevict.store.segment_file import SegmentRecord, decode_segment, encode_segment

if TYPE_CHECKING:
    from torch import Tensor

ROOT = f"v{FORMAT_VERSION}"
IDENTITY = "identity.json"
QUARANTINE_S = 60.0
"""An item that cannot be read is not tried again within this time."""
MAX_QUARANTINED = 4096


def open_backend(url: str, max_bytes: int | None = None) -> Backend:
    """Return the back end of a URL or folder without creating or contacting it; ``max_bytes`` limits a folder.

    Raises:
        ConfigError: the URL's protocol is unknown, or its package is not installed.
    """
    if url.startswith("mooncake://"):
        return MooncakeBackend(url)
    return RemoteBackend(url) if "://" in url else DirectoryBackend(Path(url).expanduser(), max_bytes)


@dataclass(frozen=True)
class StoredSegment:
    """A segment in a listing; ``identity``: digest of the identity that made it."""

    identity: str
    key: str
    item: Item


class SegmentStore:
    """The segments of one identity; those of others are neither found nor loaded.

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
        self.backend = backend
        self.identity = identity
        self._draft = draft
        self._clock = clock
        self._quarantined: dict[str, float] = {}

    def put(self, record: SegmentRecord, namespace: Namespace) -> int:
        """Write a segment, list it in its manifests, return the bytes written.

        A stored segment is kept (0 bytes are written) unless only the new one was ranked by readers.

        Raises:
            StoreError: it cannot be written.
            ValueError: the record has another identity, or a key that is not of this namespace.
        """
        tokens = record.tokens.tolist()
        if record.identity != self.identity.digest or record.key != namespace.segment(tokens, record.start):
            raise ValueError(f"the segment {record.key} is not of identity {self.identity.digest} and its namespace")
        if not self.backend.exists(self._name(IDENTITY)):
            description = json.dumps(self.identity.describe(), indent=1, sort_keys=True)
            self.backend.put(self._name(IDENTITY), description.encode())
        try:
            listed = {entry.key: entry.is_read for entry in self._first_manifest(tokens, namespace)}
        except (CorruptSegmentError, UnreadableItemError):
            listed = {}
        name, written = segment_name(record.identity, record.key), 0
        if not self.backend.exists(name) or (record.is_read and not listed.get(record.key, True)):
            data = encode_segment(record, self._draft_digest)
            self.backend.put(name, data)
            self._quarantined.pop(name, None)
            written = len(data)
        is_read = record.is_read if written else listed.get(record.key, record.is_read)
        entry = ManifestEntry(record.key, record.start, record.end, record.splittable, is_read, namespace.chain(tokens))
        for depth in self._depths(len(tokens)):
            manifest = self._manifest_name(namespace.first_tokens(tokens, depth))
            self.backend.update(manifest, lambda data: merge_manifest(data, [entry]))
        return written

    def find(self, tokens: Sequence[int], namespace: Namespace) -> Sequence[ManifestEntry]:
        """Return segments whose paths share a prompt's first tokens, newest first.

        Reads one manifest; if that is full, also those of more tokens, longest first.

        Raises:
            StoreError: the store, or a manifest, cannot be read.
            CorruptSegmentError: a manifest is corrupt; it was removed.
        """
        entries = self._first_manifest(tokens, namespace)
        if len(entries) < MAX_ENTRIES:
            return entries
        longer: list[ManifestEntry] = []
        for depth in self._depths(len(tokens))[:0:-1]:
            found = self._read_manifest(namespace.first_tokens(tokens, depth))
            longer += found
            if len(found) == MAX_ENTRIES:  # shorter manifests lost some of these entries
                break
        return list({entry.key: entry for entry in [*longer, *entries]}.values())

    def get(self, key: str) -> SegmentRecord | None:
        """Read and check a segment; None: there is none, or it is quarantined.

        Raises:
            StoreError: the store cannot be read.
            UnreadableItemError: the segment cannot be read; it is quarantined.
            CorruptSegmentError: the file is not a segment of this identity.
        """
        data = self._read(segment_name(self.identity.digest, key))
        if data is None:
            return None
        record = decode_segment(data, key, self._draft_digest)
        identity = self.identity
        if record.identity != identity.digest:
            raise CorruptSegmentError(f"identity: got {record.identity[:16]!r}; expected {identity.digest[:16]!r}")
        _check_rows("k", record.keep_lens, record.k, record.v, identity)
        if record.draft_lens is not None:
            assert self._draft is not None and record.draft_k is not None and record.draft_v is not None
            _check_rows("draft_k", record.draft_lens, record.draft_k, record.draft_v, self._draft)
        return record

    def delete(self, key: str) -> bool:
        """Remove a segment; False: there was none. Manifests may still list it."""
        return self.backend.delete(segment_name(self.identity.digest, key))

    @property
    def _draft_digest(self) -> str:
        return "" if self._draft is None else self._draft.digest

    def _read(self, name: str) -> bytes | None:
        """Bytes of an item; None: there is none, or it is quarantined."""
        until = self._quarantined.get(name)
        if until is not None and self._clock() < until:
            return None
        try:
            return self.backend.get(name)
        except StoreError as error:
            self.backend.get(self._name(IDENTITY))  # raises if the store as a whole cannot be read
            if len(self._quarantined) >= MAX_QUARANTINED:
                self._quarantined.clear()
            self._quarantined[name] = self._clock() + QUARANTINE_S
            raise UnreadableItemError(str(error)) from error

    def _first_manifest(self, tokens: Sequence[int], namespace: Namespace) -> Sequence[ManifestEntry]:
        """Entries of the manifest of the first ``min_prefix_tokens`` tokens, newest first."""
        depth = self.identity.min_prefix_tokens
        return self._read_manifest(namespace.first_tokens(tokens, depth)) if len(tokens) >= depth else []

    def _read_manifest(self, first: str) -> Sequence[ManifestEntry]:
        data = self._read(self._manifest_name(first))
        if data is None:
            return []
        try:
            return decode_manifest(data)[::-1]
        except CorruptSegmentError:
            self.backend.delete(self._manifest_name(first))
            raise

    def _depths(self, num_tokens: int) -> Sequence[int]:
        """Numbers of first tokens by which a sequence is listed: ``min_prefix_tokens`` times 1, 2, 4, ..."""
        depths = [self.identity.min_prefix_tokens]
        while 2 * depths[-1] <= num_tokens:
            depths.append(2 * depths[-1])
        return depths

    def _manifest_name(self, first: str) -> str:
        return self._name(f"manifests/{first[:2]}/{first}")

    def _name(self, name: str) -> str:
        return f"{ROOT}/{self.identity.digest}/{name}"


def _check_rows(name: str, lens: Tensor, k: Tensor, v: Tensor, identity: StoreIdentity) -> None:
    """Raise ``CorruptSegmentError`` unless runs and rows are those of a model's pool."""
    heads, expected = (identity.num_layers, identity.num_kv_heads), (identity.head_dim, identity.own_value_dim)
    widths = k.shape[1], v.shape[1]
    if tuple(lens.shape) != heads or widths != expected:
        raise CorruptSegmentError(
            f"{name}: got runs of {tuple(lens.shape)} and rows of {widths} numbers; expected {heads} and {expected}"
        )
    if str(k.dtype) != identity.dtype:
        raise CorruptSegmentError(f"{name}: got {k.dtype}; expected {identity.dtype}")


def segment_name(identity: str, key: str) -> str:
    """Name of a segment in a back end."""
    return f"{ROOT}/{identity}/segments/{key[:2]}/{key}"


def list_segments(backend: Backend) -> Iterator[StoredSegment]:
    """Yield the segments of all identities, unordered."""
    for item in backend.list(ROOT):
        parts = item.name.split("/")
        if len(parts) == 5 and parts[2] == "segments":
            yield StoredSegment(parts[1], parts[4], item)


def describe_identity(backend: Backend, identity: str) -> dict[str, Any] | None:
    """Return the stored description of an identity; None: there is none."""
    data = backend.get(f"{ROOT}/{identity}/{IDENTITY}")
    if data is None:
        return None
    try:
        values = json.loads(data)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
