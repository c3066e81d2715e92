"""A manifest lists segments whose paths begin with the same tokens: one read finds the longest for a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from sgl_kvevict.errors import CorruptSegmentError
from sgl_kvevict.store.identity import CHAIN_DIGITS, CHAIN_TOKENS, FORMAT_VERSION

MAX_ENTRIES = 256
"""Entries of one manifest; the newest are kept."""
MAX_BYTES = 64 << 20


class ManifestEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stored segment.

    Attributes:
        key: its name, 64 hexadecimal digits.
        start: logical position of its first token; ``end``: after its last token.
        splittable: a prompt that diverges inside it can use its beginning.
        is_read: its entries were ranked by readers' attention, not by predicted scores.
        chain: hashes of the blocks of its path, see :meth:`sgl_kvevict.store.identity.Namespace.chain`.
    """

    key: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    start: Annotated[int, msgspec.Meta(ge=0)]
    end: int
    splittable: bool
    is_read: bool
    chain: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]*$")]

    def __post_init__(self) -> None:
        """Check fields against each other, also when an entry is decoded."""
        if self.start >= self.end:
            raise ValueError(f"start {self.start}, end {self.end}: expected start < end")
        if len(self.chain) != self.end // CHAIN_TOKENS * CHAIN_DIGITS:
            raise ValueError(f"chain: got {len(self.chain)} digits for {self.end} tokens")

    def overlap(self, chain: str, num_tokens: int) -> int:
        """Tokens that a prompt (its chain and length) shares with the beginning of the segment's path, in whole blocks.

        ``end`` if all whole blocks agree and the prompt is long enough; the last tokens are compared once the segment
        is read.
        """
        if num_tokens >= self.end and chain.startswith(self.chain):
            return self.end
        blocks = range(0, min(len(self.chain), len(chain)), CHAIN_DIGITS)
        same = (self.chain[i : i + CHAIN_DIGITS] == chain[i : i + CHAIN_DIGITS] for i in blocks)
        return next((i for i, agrees in enumerate(same) if not agrees), len(blocks)) * CHAIN_TOKENS


class _Manifest(msgspec.Struct):
    version: int
    segments: list[ManifestEntry]


def encode_manifest(entries: Sequence[ManifestEntry]) -> bytes:
    """Return the bytes of a manifest: the SHA-256 of its JSON text in hexadecimal digits, a newline, and the text."""
    text = msgspec.json.encode(_Manifest(FORMAT_VERSION, list(entries)))
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def decode_manifest(data: bytes) -> list[ManifestEntry]:
    """Check the bytes of a manifest and return its entries, oldest first.

    Raises:
        CorruptSegmentError: :func:`encode_manifest` did not make them.
    """
    checksum, _, text = data.partition(b"\n")
    if len(data) > MAX_BYTES or hashlib.sha256(text).hexdigest().encode() != checksum:
        raise CorruptSegmentError("manifest: the checksum does not match")
    try:
        manifest = msgspec.json.decode(text, type=_Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptSegmentError(f"manifest: {error}") from error
    if manifest.version != FORMAT_VERSION:
        raise CorruptSegmentError(f"manifest: got version {manifest.version}; expected {FORMAT_VERSION}")
    return manifest.segments


def merge_manifest(data: bytes | None, entries: Sequence[ManifestEntry]) -> bytes:
    """Return a manifest (None or corrupt: an empty one) with ``entries`` as the newest; equal keys are replaced."""
    try:
        there = [] if data is None else decode_manifest(data)
    except CorruptSegmentError:
        there = []
    new = {entry.key for entry in entries}
    return encode_manifest([*(entry for entry in there if entry.key not in new), *entries][-MAX_ENTRIES:])
