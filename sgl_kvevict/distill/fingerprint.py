"""Tells a model's weights from others by a sample of their bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SAMPLES = 8
_SAMPLE_BYTES = 64
_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 1 << 28


def fingerprint_of(folder: Path) -> str | None:
    """A hash of names, types, shapes and sampled bytes of all tensors of a model folder.

    However the tensors are spread over files, the same model has the same fingerprint. Eight samples of each tensor are
    read, not all of it: enough to tell a model from its fine-tuned relatives, whose every number differs a little.

    Args:
        folder: with safetensors files.

    Returns:
        64 hexadecimal digits; None if there are no safetensors files, or one cannot be read.
    """
    found: list[tuple[str, bytes]] = []
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                found += _tensors(file)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not found:
        return None
    digest = hashlib.sha256()
    for name, content in sorted(found):
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


def _tensors(file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Names of a file's tensors, each with its type, its shape and some of its bytes."""
    length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"a header that is a {type(header).__name__}")
    data = _HEADER_LENGTH_BYTES + length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        parts = [f"{entry['dtype']} {entry['shape']}".encode()]
        for i in range(_SAMPLES):
            file.seek(data + begin + max(end - begin - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1))
            parts.append(file.read(min(_SAMPLE_BYTES, end - begin)))
        yield name, b"".join(parts)
