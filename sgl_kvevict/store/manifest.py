"""Which segments begin with the same tokens: what one look-up reads to find the longest that a prompt can use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvevict.errors import CorruptSegmentError, shown
from sgl_kvevict.store.identity import CHAIN_BYTES, CHAIN_TOKENS, FORMAT_VERSION

MAX_ENTRIES = 256
"""Of one manifest; the newest are listed."""
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class ManifestEntry:
    """One stored segment.

    Attributes:
        key: its name.
        start: logical position of its first token.
        end: logical position after its last one.
        splittable: a prompt that leaves it in the middle can use its beginning.
        is_read: readers ordered its entries, not what a policy expected of them.
        chain: hashes of the whole blocks of its path, see :meth:`sgl_kvevict.store.identity.Namespace.chain`.
    """

    key: str
    start: int
    end: int
    splittable: bool
    is_read: bool
    chain: tuple[bytes, ...]

    def overlap(self, chain: Sequence[bytes], num_tokens: int) -> int:
        """Tokens from the path's beginning that a prompt surely shares with the segment's path, by whole blocks.

        Args:
            chain: of the prompt.
            num_tokens: of the prompt.

        Returns:
            ``end``, if all whole blocks agree and the prompt is long enough: what is left is seen when it is read.
        """
        same = 0
        for ours, theirs in zip(self.chain, chain, strict=False):
            if ours != theirs:
                break
            same += 1
        return self.end if same == len(self.chain) and num_tokens >= self.end else same * CHAIN_TOKENS


def encode_manifest(entries: Sequence[ManifestEntry]) -> bytes:
    """Return the bytes of a manifest: the SHA-256 of its text in hexadecimal digits, a newline, and the text, JSON."""
    listed = [
        {
            "key": entry.key,
            "start": entry.start,
            "end": entry.end,
            "splittable": entry.splittable,
            "is_read": entry.is_read,
            "chain": b"".join(entry.chain).hex(),
        }
        for entry in entries
    ]
    text = json.dumps({"version": FORMAT_VERSION, "segments": listed}, separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def decode_manifest(data: bytes) -> list[ManifestEntry]:
    """Check the bytes of a manifest and return its entries, oldest first.

    Raises:
        CorruptSegmentError: they are not what :func:`encode_manifest` returned.
    """
    checksum, _, text = data.partition(b"\n")
    if len(data) > MAX_BYTES or hashlib.sha256(text).hexdigest().encode() != checksum:
        raise CorruptSegmentError("manifest: the checksum does not match")
    try:
        content = json.loads(text)
        if content["version"] != FORMAT_VERSION:
            raise CorruptSegmentError(f"manifest: got version {shown(content['version'])}; expected {FORMAT_VERSION}")
        return [_entry(each) for each in content["segments"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptSegmentError(f"manifest: {type(error).__name__}: {error}") from error


def merge_manifest(data: bytes | None, entries: Sequence[ManifestEntry]) -> bytes:
    """Return a manifest with further entries, the newest last, and no more than it may list.

    Args:
        data: the manifest as it is; None: there is none. One that cannot be read is begun anew.
        entries: to add; they take the place of those of the same name.
    """
    try:
        there = [] if data is None else decode_manifest(data)
    except CorruptSegmentError:
        there = []
    new = {entry.key for entry in entries}
    return encode_manifest([*(entry for entry in there if entry.key not in new), *entries][-MAX_ENTRIES:])


def _entry(values: dict[str, object]) -> ManifestEntry:
    key, start, end, splittable, is_read = (values[name] for name in ("key", "start", "end", "splittable", "is_read"))
    hashes = bytes.fromhex(str(values["chain"]))
    if not isinstance(key, str) or len(key) != 64 or set(key) - set("0123456789abcdef"):
        raise ValueError(f"key {shown(key)}")
    if type(start) is not int or type(end) is not int or not 0 <= start < end:
        raise ValueError(f"start {shown(start)}, end {shown(end)}")
    if type(splittable) is not bool or type(is_read) is not bool:
        raise ValueError(f"splittable {shown(splittable)}, is_read {shown(is_read)}")
    if len(hashes) != end // CHAIN_TOKENS * CHAIN_BYTES:
        raise ValueError(f"{len(hashes)} bytes of hashes for {end} tokens")
    chain = tuple(hashes[i : i + CHAIN_BYTES] for i in range(0, len(hashes), CHAIN_BYTES))
    return ManifestEntry(key, start, end, splittable, is_read, chain)
