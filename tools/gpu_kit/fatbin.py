"""Take the machine code of other GPU architectures out of a compiled CUDA library.

nvcc puts the code of every architecture into fatbins, which lie one after the other in the ELF section ``.nv_fatbin``
of the host library. A fatbin is a header (magic number, version, size of the header, size of the entries) and entries,
one for each architecture, machine code or PTX. :func:`prune` rewrites the section in place: offsets outside of it stay,
what was dropped becomes zeros, and zeros take no room when the file is packed (``packing.py``).

The layout was read from files that nvcc 13.0 wrote; NVIDIA does not document it.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAGIC = 0xBA55ED50
SECTION = ".nv_fatbin"
MACHINE_CODE = 2
"""Kind of an entry; 1 is PTX."""
HEADER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQIIHHI")
ALIGNMENT = 8


class FatbinError(ValueError):
    """A file is no ELF library with fatbins, or a fatbin does not have the layout that we know."""


@dataclass(frozen=True)
class Entry:
    """Code for one architecture.

    Attributes:
        start: offset in the file of the entry's header.
        header: bytes of the header.
        size: bytes of the code.
        arch: 90 for sm_90 and sm_90a.
        is_machine_code: False for PTX.
    """

    start: int
    header: int
    size: int
    arch: int
    is_machine_code: bool


@dataclass(frozen=True)
class Fatbin:
    """One fatbin of a library.

    Attributes:
        start: offset in the file.
        header: bytes of the header.
        size: bytes of the entries.
        entries: code, in the order of the file.
    """

    start: int
    header: int
    size: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Pruned:
    """A library with less code in it: as long as before, and the number of fatbins with code (kept) and without."""

    data: bytes
    kept: int
    dropped: int


def find_section(data: bytes, wanted: str = SECTION) -> tuple[int, int]:
    """Offset and length of a section of a 64-bit ELF file.

    Raises:
        FatbinError: it is not one, or has no such section.
    """
    if data[:5] != b"\x7fELF\x02":
        raise FatbinError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    start = heads[names][4]
    for name, _, _, _, offset, length in heads:
        if data[start + name : data.index(b"\0", start + name)].decode() == wanted:
            return offset, length
    raise FatbinError(f"no section {wanted}")


def fatbins(data: bytes) -> Iterator[Fatbin]:
    """All fatbins of a library, by offset.

    Raises:
        FatbinError: the file is no library with fatbins, or entries do not fill their fatbin.
    """
    start, length = find_section(data)
    end = start + length
    while start + HEADER.size <= end:
        if int.from_bytes(data[start : start + 4], "little") != MAGIC:
            start += ALIGNMENT
            continue
        _, _, header, size = HEADER.unpack_from(data, start)
        entries, at, stop = [], start + header, start + header + size
        while at < stop:
            kind, _, entry_header, entry_size, *_, arch = ENTRY.unpack_from(data, at)
            if not entry_header or at + entry_header + entry_size > stop:
                raise FatbinError(f"fatbin at {start}: the entry at {at} does not end within it")
            entries.append(Entry(at, entry_header, entry_size, arch, kind == MACHINE_CODE))
            at += entry_header + entry_size
        yield Fatbin(start, header, size, tuple(entries))
        start = stop


def prune(data: bytes, arch: int, empty: bytes, is_wanted: Callable[[bytes], bool] = lambda code: True) -> Pruned:
    """Keep the machine code of one architecture.

    Args:
        data: the library.
        arch: 90 for sm_90 and sm_90a.
        empty: stands for a fatbin of which nothing is kept: one for another architecture, so that the CUDA runtime
            says "no kernel image is available" when a kernel of it is launched, and nothing before.
        is_wanted: of an entry's machine code (an ELF file); a fatbin is kept whole if one entry is wanted.

    Raises:
        FatbinError: see :func:`fatbins`; or ``empty`` is larger than a fatbin that it stands for.
    """
    out, kept, dropped = bytearray(data), 0, 0
    for fatbin in fatbins(data):
        mine = [entry for entry in fatbin.entries if entry.arch == arch and entry.is_machine_code]
        codes = (data[entry.start + entry.header :][: entry.size] for entry in mine)
        if any(is_wanted(code) for code in codes):
            body = b"".join(data[entry.start :][: entry.header + entry.size] for entry in mine)
            extra = data[fatbin.start + HEADER.size : fatbin.start + fatbin.header]
            new = HEADER.pack(MAGIC, 1, fatbin.header, len(body)) + extra + body
            kept += 1
        else:
            new = empty
            dropped += 1
        room = fatbin.header + fatbin.size
        if len(new) > room:
            raise FatbinError(f"fatbin at {fatbin.start} has {room} bytes, its replacement {len(new)}")
        out[fatbin.start : fatbin.start + room] = new.ljust(room, b"\0")
    return Pruned(bytes(out), kept, dropped)


def is_wanted_fa3(code: bytes, head_dims: tuple[str, ...] = ("64", "128")) -> bool:
    """Whether machine code of FA3 is for bfloat16, one of ``head_dims``, and no soft cap; or is a helper of all.

    FA3's binary has one entry for each combination of template arguments. They are in the mangled names of its kernels,
    which are names of sections of the machine code. Needs ``c++filt``.
    """
    names = set(re.findall(rb"\.text\.(_Z[A-Za-z0-9_]+)", code))
    main = [name for name in names if b"CollectiveMainloopFwd" in name]
    if not main:
        return bool(names)  # combines partial results, or prepares a schedule
    filtered = subprocess.run(["c++filt"], input=b"\n".join(main), stdout=subprocess.PIPE, check=True).stdout.decode()
    shape = re.compile(
        r"CollectiveMainloopFwdSm90<\d+, cute::tuple<.*?>, cute::tuple<cute::C<\d+>, cute::C<\d+>, cute::C<(\d+)> >, "
        r"(\d+), ([\w:]+), float, cutlass::arch::Sm90, \w+, \w+, (\w+),"
    )
    return any(
        found and found[1] == found[2] in head_dims and found[3] == "cutlass::bfloat16_t" and found[4] == "false"
        for found in map(shape.search, filtered.splitlines())
    )
