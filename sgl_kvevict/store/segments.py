"""Segments in a store: by key, and by the prompts that can use them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvevict.errors import CorruptSegmentError
from sgl_kvevict.store.backend import Backend, Item
from sgl_kvevict.store.directory import DirectoryBackend
from sgl_kvevict.store.identity import FORMAT_VERSION, Namespace, StoreIdentity
from sgl_kvevict.store.manifest import MAX_ENTRIES, ManifestEntry, decode_manifest, merge_manifest
from sgl_kvevict.store.mooncake import MooncakeBackend
from sgl_kvevict.store.remote import RemoteBackend
from sgl_kvevict.store.segment_file import SegmentRecord, decode_segment, encode_segment

ROOT = f"v{FORMAT_VERSION}"
IDENTITY = "identity.json"


def open_backend(url: str, max_bytes: int | None = None) -> Backend:
    """Return the back end that a URL, or the path of a folder, stands for.

    Args:
        url: the field ``store`` of the configuration.
        max_bytes: size limit of a folder.

    Raises:
        ConfigError: what the URL needs is not installed, or there is no such protocol.
        StoreError: the folder cannot be made.
    """
    if url.startswith("mooncake://"):
        return MooncakeBackend(url)
    return RemoteBackend(url) if "://" in url else DirectoryBackend(Path(url).expanduser(), max_bytes)


@dataclass(frozen=True)
class StoredSegment:
    """A segment in a listing.

    Attributes:
        identity: digest of who made it.
        key: its name.
        item: size and age.
    """

    identity: str
    key: str
    item: Item


class SegmentStore:
    """The segments of one identity.

    Args:
        backend: where the bytes are.
        identity: of who reads and writes. What others wrote is neither found nor loaded.
    """

    def __init__(self, backend: Backend, identity: StoreIdentity) -> None:
        self.backend = backend
        self.identity = identity

    def put(self, record: SegmentRecord, namespace: Namespace) -> int:
        """Write a segment and list it in its manifests.

        One that is there is left alone, unless readers have ordered the new one and nobody that one.

        Args:
            record: the segment, of this identity.
            namespace: whose it is.

        Returns:
            Bytes written; 0 if the segment was there, then only the manifests are looked after.

        Raises:
            StoreError: it cannot be written.
            ValueError: the record is of another identity, or under a key that is not its own.
        """
        tokens = record.tokens.tolist()
        if record.identity != self.identity.digest or record.key != namespace.segment(tokens, record.start):
            raise ValueError(f"the segment {record.key} is not of identity {self.identity.digest} and its namespace")
        self._describe()
        name, written = segment_name(record.identity, record.key), 0
        try:
            listed = {entry.key: entry.is_read for entry in self._listed(tokens, namespace)}
        except CorruptSegmentError:
            listed = {}  # it was removed, and is begun anew
        is_there = self.backend.exists(name)
        if not is_there or (record.is_read and not listed.get(record.key, True)):
            data = encode_segment(record)
            self.backend.put(name, data)
            written = len(data)
        is_read = record.is_read if written else listed.get(record.key, record.is_read)
        chain = tuple(namespace.chain(tokens))
        entry = ManifestEntry(record.key, record.start, record.end, record.splittable, is_read, chain)
        for depth in self._depths(len(tokens)):
            manifest = self._manifest_name(namespace.first_tokens(tokens, depth))
            self.backend.update(manifest, lambda data: merge_manifest(data, [entry]))
        return written

    def find(self, tokens: Sequence[int], namespace: Namespace) -> Sequence[ManifestEntry]:
        """Segments whose paths begin as a prompt does, the newest first.

        One look-up, unless so many begin alike that the first manifest is full: then those of more tokens are asked
        too, the longest first.

        Raises:
            StoreError: the store cannot be read.
            CorruptSegmentError: a manifest is none; it is removed, and what it listed is not found through it.
        """
        entries = self._listed(tokens, namespace)
        if len(entries) < MAX_ENTRIES:
            return entries
        longer: list[ManifestEntry] = []
        for depth in self._depths(len(tokens))[:0:-1]:
            found = self._read_manifest(namespace.first_tokens(tokens, depth))
            longer += found
            if len(found) == MAX_ENTRIES:  # those of fewer tokens forgot some of these
                break
        return list({entry.key: entry for entry in [*longer, *entries]}.values())

    def get(self, key: str) -> SegmentRecord | None:
        """Read and check a segment; None: there is none.

        Raises:
            StoreError: the store cannot be read.
            CorruptSegmentError: what is there is no segment, or not one of this identity.
        """
        data = self.backend.get(segment_name(self.identity.digest, key))
        if data is None:
            return None
        record = decode_segment(data, key)
        identity = self.identity
        if record.identity != identity.digest:
            raise CorruptSegmentError(f"identity: got {record.identity[:16]!r}; expected {identity.digest[:16]!r}")
        heads = (identity.num_layers, identity.num_kv_heads)
        if tuple(record.keep_lens.shape) != heads or record.k.shape[1] != identity.head_dim:
            raise CorruptSegmentError(
                f"got runs of {tuple(record.keep_lens.shape)} and rows of {record.k.shape[1]} numbers; "
                f"expected {heads} and {identity.head_dim}"
            )
        if str(record.k.dtype) != identity.dtype:
            raise CorruptSegmentError(f"k: got {record.k.dtype}; expected {identity.dtype}")
        return record

    def delete(self, key: str) -> bool:
        """Remove a segment; False: there was none. Manifests that list it find that it is gone."""
        return self.backend.delete(segment_name(self.identity.digest, key))

    def _listed(self, tokens: Sequence[int], namespace: Namespace) -> Sequence[ManifestEntry]:
        """What the first manifest of a sequence lists, the newest first."""
        depth = self.identity.min_prefix_tokens
        return self._read_manifest(namespace.first_tokens(tokens, depth)) if len(tokens) >= depth else []

    def _read_manifest(self, first: str) -> Sequence[ManifestEntry]:
        data = self.backend.get(self._manifest_name(first))
        if data is None:
            return []
        try:
            return decode_manifest(data)[::-1]
        except CorruptSegmentError:
            self.backend.delete(self._manifest_name(first))
            raise

    def _depths(self, num_tokens: int) -> Sequence[int]:
        """By how many of its first tokens a sequence is listed: ``min_prefix_tokens`` times 1, 2, 4, ..."""
        depths = [self.identity.min_prefix_tokens]
        while 2 * depths[-1] <= num_tokens:
            depths.append(2 * depths[-1])
        return depths

    def _manifest_name(self, first: str) -> str:
        return f"{ROOT}/{self.identity.digest}/manifests/{first[:2]}/{first}"

    def _describe(self) -> None:
        """Say in words whose segments these are, if it is not there (any more)."""
        name = f"{ROOT}/{self.identity.digest}/{IDENTITY}"
        if not self.backend.exists(name):
            self.backend.put(name, json.dumps(self.identity.describe(), indent=1, sort_keys=True).encode())


def segment_name(identity: str, key: str) -> str:
    """Name of a segment in a back end."""
    return f"{ROOT}/{identity}/segments/{key[:2]}/{key}"


def list_segments(backend: Backend) -> Iterator[StoredSegment]:
    """Segments of all identities, in no particular order."""
    for item in backend.list(ROOT):
        parts = item.name.split("/")
        if len(parts) == 5 and parts[2] == "segments":
            yield StoredSegment(parts[1], parts[4], item)


def describe_identity(backend: Backend, identity: str) -> dict[str, Any] | None:
    """What is known of who made segments; None: nothing."""
    data = backend.get(f"{ROOT}/{identity}/{IDENTITY}")
    if data is None:
        return None
    try:
        values = json.loads(data)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
