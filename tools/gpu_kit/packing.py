"""Archives of the kit: the same bytes from the same files, and files that are mostly zeros without their zeros.

Standard library only; ``unpack.py`` uses it on the GPU machine.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import tarfile
from pathlib import Path

BLOCK = 4096
INDEX = ".extents.json"
EXTENTS = ".extents"
SUMS = "SHA256SUMS"


def write_extents(data: bytes, path: Path) -> None:
    """Write a file without its blocks of zeros: ``path.extents`` with an index, of which :func:`join_extents` makes it.

    FA3's library is 1.4 GB of which a pruned one has 5 %: tar and xz would still read and write all of it.
    """
    extents: list[list[int]] = []
    parts: list[bytes] = []
    zeros = bytes(BLOCK)
    for at in range(0, len(data), BLOCK):
        block = data[at : at + BLOCK]
        if block == zeros[: len(block)]:
            continue
        if extents and sum(extents[-1]) == at:
            extents[-1][1] += len(block)
        else:
            extents.append([at, len(block)])
        parts.append(block)
    index = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "extents": extents}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + INDEX).write_text(json.dumps(index))
    path.with_name(path.name + EXTENTS).write_bytes(b"".join(parts))


def join_extents(index: Path) -> Path:
    """Make the file of an index and its extents, sparse where the file system can; both are deleted.

    The archive's checksum is checked before; a second pass over a gigabyte of zeros would take seconds.

    Raises:
        ValueError: the extents are shorter than the index says.
    """
    target = index.with_name(index.name.removesuffix(INDEX))
    packed = target.with_name(target.name + EXTENTS)
    facts = json.loads(index.read_text())
    with packed.open("rb") as source, target.open("wb") as out:
        for at, length in facts["extents"]:
            out.seek(at)
            if out.write(source.read(length)) != length:
                raise ValueError(f"{packed.name} is shorter than its index says")
        out.truncate(facts["size"])
    packed.unlink()
    index.unlink()
    return target


def pack(tree: Path, path: Path, preset: int = 6) -> None:
    """Write all files of a folder to a ``.tar.xz``, with names in order and without times and owners."""
    with lzma.open(path, "wb", preset=preset) as out, tarfile.open(fileobj=out, mode="w") as archive:
        for file in sorted(p for p in tree.rglob("*") if p.is_file()):
            info = archive.gettarinfo(file, str(file.relative_to(tree)))
            info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
            with file.open("rb") as source:
                archive.addfile(info, source)


def extract(path: Path, target: Path) -> None:
    """Unpack a ``.tar.xz`` into a folder, and make the files that it has as extents."""
    with tarfile.open(path) as archive:
        archive.extractall(target, filter="data")
        names = archive.getnames()
    for name in names:
        if name.endswith(INDEX):
            join_extents(target / name)


def sha256(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Write the checksums of a folder's files to its ``SHA256SUMS``, as ``sha256sum`` does."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    (folder / SUMS).write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files))


def read_sums(folder: Path) -> dict[str, str]:
    """Checksums by name.

    Raises:
        FileNotFoundError: the folder has no ``SHA256SUMS``.
    """
    lines = (folder / SUMS).read_text().splitlines()
    return {name.strip().removeprefix("*"): digest for digest, _, name in (line.partition(" ") for line in lines)}
