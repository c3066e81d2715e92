"""Move K and V rows to other places in their arenas, or out of them and back, in rows of as many or fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.checks import KV_DTYPES, check_index_range, check_tensor
from kvevict_kernels.dispatch import implementation
from kvevict_kernels.row_codec import (
    WIDTHS,
    RowCoding,
    check_coding,
    encode_rows,
    read_rows,
    rotation,
    row_bytes,
    rows_per_slot,
    write_rows,
)
from kvevict_kernels.span_attention import reason_not_to_run
from kvevict_kernels.span_attention.call import KINDS

__all__ = ["encoded_rows", "prepare_on_cpu", "recode_rows", "temporary_bytes", "write_encoded"]

CHUNK_ROWS = 4096
"""Rows of which the CPU path has float32 copies at a time."""

ALIGNMENT = 16
"""Bytes: where the rows of a target begin in the temporary, so that every call runs the same compiled kernels."""

Target = tuple[Tensor, int]
"""Row numbers [n], int32, and the bits of these rows."""


@dataclass(frozen=True)
class Encoding:
    """Rows of one arena to be written with ``bits`` bits, one after the other; see :func:`recode_rows`."""

    arena: Tensor
    is_v: int  # 1 for values, 0 for keys
    rows: Tensor  # [n], int32, row numbers to read
    bits_of_rows: Tensor  # [n], int8, bits of each of them
    runs: Tensor  # [n], int32
    bits: int  # 16 or 4, of the rows that are written
    coding: RowCoding | None  # None: ``bits`` is 16
    out: Tensor  # [n, row_bytes], uint8, where they are written


def temporary_bytes(arena: Tensor, targets: Sequence[Target]) -> int:
    """Bytes of the temporary of :func:`recode_rows`: the rows of one arena, encoded."""
    return sum(-(-num_bytes // ALIGNMENT) * ALIGNMENT for num_bytes in _target_bytes(arena, targets))


def _target_bytes(arena: Tensor, targets: Sequence[Target]) -> list[int]:
    return [rows.numel() * row_bytes(bits, arena.shape[-1], arena.element_size()) for rows, bits in targets]


def _staged_rows(arena: Tensor, targets: Sequence[Target], temporary: Tensor) -> list[Tensor]:
    """The encoded rows of each target in the temporary: [n, row_bytes], uint8."""
    staged, first = [], 0
    for (rows, _), num_bytes in zip(targets, _target_bytes(arena, targets), strict=True):
        staged.append(temporary[first : first + num_bytes].view(rows.numel(), -1 if num_bytes else 0))
        first += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return staged


def recode_rows(
    k_arena: Tensor,
    v_arena: Tensor,
    source_rows: Tensor,
    source_bits: Tensor,
    runs: Tensor,
    targets: Sequence[Target],
    coding: RowCoding | None,
    temporary: Tensor | None = None,
) -> None:
    """Copy rows of both arenas to new places, and encode them in the bits of their place.

    The entries are those of all ``targets``, one after the other. An entry whose place has the bits of its source keeps
    its bytes. What is read is the content before the call: sources and targets may overlap in any way.

    Args:
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], bfloat16, float16 or float32.
        v_arena: like ``k_arena``.
        source_rows: [n], int32, row numbers to read, of each entry's width; may repeat.
        source_bits: [n], int8, 16 or 4: bits of each row to read.
        runs: [n], int32, ``layer * num_kv_heads + head`` of each entry, by which it is normalised.
        targets: row numbers to write, all different, and their bits, none above those of the entry's source; together
            n rows. A place of each number of bits; rows of different widths do not overlap.
        coding: of the arenas' rows of 4 bits; None: all rows have 16.
        temporary: [:func:`temporary_bytes` or more], uint8, on the arenas' device; None: it is allocated. Nothing is
            written to the arenas before it is.

    Raises:
        ValueError: wrong shape, dtype, device or bits; a coding that does not fit the arena, or none with 4 bits; on
            the CPU also a row or run outside of the arena, a target row that repeats, or bits that would grow.

    Source: see ``row_codec.py``.
    Cost: reads and writes n rows of K, then of V, and writes and reads them once more in the temporary, as they are
        encoded; no float copy of more than a few thousand rows; two launches per arena and target on a device, no host
        sync; deterministic, no atomics. The temporary is not cut into chunks: an entry's place may hold the source of
        any other, and which of them only the device knows.
    """
    device = k_arena.device
    _check_entries(k_arena, v_arena, source_rows, source_bits, runs, targets, coding)
    counts = [rows.numel() for rows, _ in targets]
    if sum(counts) != source_rows.numel():
        raise ValueError(f"targets: expected {source_rows.numel()} rows, as many as source_rows, got {counts}")
    parts = list(zip(*(torch.split(x, counts) for x in (source_rows, source_bits, runs)), targets, strict=True))
    if device.type == "cpu":
        for rows, bits_of_rows, _, (places, bits) in parts:
            _check_different("targets", places)
            _check_sources(k_arena, rows, bits_of_rows, bits)
    needed = temporary_bytes(k_arena, targets)
    if temporary is None:
        temporary = torch.empty(needed, dtype=torch.uint8, device=device)
    check_tensor("temporary", temporary, (None,), torch.uint8, device)
    if temporary.numel() < needed:
        raise ValueError(f"temporary: expected {needed} bytes, got {temporary.numel()}")
    staged = _staged_rows(k_arena, targets, temporary)
    encode = implementation(device, encode_cpu, "recode_rows")
    write = implementation(device, write_cpu, "recode_rows")
    for is_v, arena in enumerate((k_arena, v_arena)):
        for (rows, bits_of_rows, own_runs, (_, bits)), out in zip(parts, staged, strict=True):
            encode(Encoding(arena, is_v, rows, bits_of_rows, own_runs, bits, coding, out))
        for (places, bits), encoded in zip(targets, staged, strict=True):
            write(arena, places, encoded, steps_of(coding, bits, is_v))


def encoded_rows(
    k_arena: Tensor,
    v_arena: Tensor,
    source_rows: Tensor,
    source_bits: Tensor,
    runs: Tensor,
    coding: RowCoding,
) -> tuple[Tensor, Tensor]:
    """Copy rows out of both arenas, encoded in 4 bits: what :func:`recode_rows` writes to its places.

    Args:
        k_arena: as in :func:`recode_rows`, like all other arguments.
        v_arena: like ``k_arena``.
        source_rows: row numbers to read.
        source_bits: bits of each of them; a row that has 4 keeps its bytes.
        runs: of each entry.
        coding: of the arenas' rows of 4 bits.

    Returns:
        Rows of K and of V, [n, :func:`~kvevict_kernels.row_codec.row_bytes`], uint8.

    Raises:
        ValueError: as :func:`recode_rows`.

    Cost: reads the rows and writes them encoded, without a float copy; one launch per arena on a device, no host sync.
    """
    _check_entries(k_arena, v_arena, source_rows, source_bits, runs, [], coding)
    if source_rows.device.type == "cpu":
        _check_sources(k_arena, source_rows, source_bits, WIDTHS[1])
    shape = (source_rows.numel(), row_bytes(WIDTHS[1], k_arena.shape[-1]))
    k, v = (torch.empty(shape, dtype=torch.uint8, device=source_rows.device) for _ in "kv")
    encode = implementation(source_rows.device, encode_cpu, "recode_rows")
    for is_v, (arena, out) in enumerate(((k_arena, k), (v_arena, v))):
        encode(Encoding(arena, is_v, source_rows, source_bits, runs, WIDTHS[1], coding, out))
    return k, v


def write_encoded(k_arena: Tensor, v_arena: Tensor, places: Tensor, k: Tensor, v: Tensor, coding: RowCoding) -> None:
    """Write rows of 4 bits, as :func:`encoded_rows` returns them, to places of both arenas.

    Args:
        k_arena: as in :func:`recode_rows`.
        v_arena: like ``k_arena``.
        places: [n], int32, row numbers of this width, all different.
        k: [n, :func:`~kvevict_kernels.row_codec.row_bytes`], uint8, on the arenas' device.
        v: like ``k``.
        coding: of the arenas' rows of 4 bits.

    Raises:
        ValueError: wrong shape, dtype, device or bits; on the CPU also a place outside of the arena, or repeated.
    """
    _check_arenas(k_arena, v_arena, coding)
    _check_rows("places", places, WIDTHS[1], k_arena)
    shape = (places.numel(), row_bytes(WIDTHS[1], k_arena.shape[-1]))
    check_tensor("k", k, shape, torch.uint8, k_arena.device)
    check_tensor("v", v, shape, torch.uint8, k_arena.device)
    if places.device.type == "cpu":
        _check_different("places", places)
    write = implementation(places.device, write_cpu, "recode_rows")
    write(k_arena, places, k, coding.k_steps)
    write(v_arena, places, v, coding.v_steps)


def prepare_on_cpu(head_dim: int) -> None:
    """Compile or load what these functions run on a CPU, which takes seconds, so that no request waits for it."""
    if reason_not_to_run(head_dim) is None:
        from kvevict_kernels.recode_rows.numba_impl import calls

        calls()


def _check_arenas(k_arena: Tensor, v_arena: Tensor, coding: RowCoding | None) -> None:
    check_tensor("k_arena", k_arena, (None, None, None, None), KV_DTYPES)
    check_tensor("v_arena", v_arena, tuple(k_arena.shape), k_arena.dtype, k_arena.device)
    check_coding(k_arena, coding)


def _check_rows(name: str, rows: Tensor, bits: int, arena: Tensor) -> None:
    check_tensor(name, rows, (None,), torch.int32, arena.device)
    check_index_range(name, rows, arena.shape[:3].numel() * rows_per_slot(bits))


def _check_entries(
    k_arena: Tensor,
    v_arena: Tensor,
    source_rows: Tensor,
    source_bits: Tensor,
    runs: Tensor,
    targets: Sequence[Target],
    coding: RowCoding | None,
) -> None:
    """What every call requires of its arguments, whatever the device."""
    _check_arenas(k_arena, v_arena, coding)
    device = k_arena.device
    check_tensor("source_rows", source_rows, (None,), torch.int32, device)
    check_tensor("source_bits", source_bits, (source_rows.numel(),), torch.int8, device)
    check_tensor("runs", runs, (source_rows.numel(),), torch.int32, device)
    check_index_range("runs", runs, k_arena.shape[0] * k_arena.shape[2])
    for rows, bits in targets:
        if bits not in WIDTHS:
            raise ValueError(f"targets: expected rows of 16 or 4 bits, got {bits}")
        if bits != WIDTHS[0] and coding is None:
            raise ValueError(f"coding: rows of {bits} bits need one, got None")
        _check_rows("targets", rows, bits, k_arena)


def steps_of(coding: RowCoding | None, bits: int, is_v: int) -> Tensor | None:
    """Steps of an arena's rows of these bits; None: they have 16."""
    return None if coding is None or bits == WIDTHS[0] else coding.steps(is_v)


def encode_cpu(encoding: Encoding) -> None:
    """Write the encoded rows: numba, or torch where numba cannot run."""
    encode = _compiled_encode if reason_not_to_run(encoding.arena.shape[-1]) is None else _encode
    encode(encoding)


def write_cpu(arena: Tensor, places: Tensor, encoded: Tensor, steps: Tensor | None) -> None:
    """Write rows, [n, row_bytes], to places of one arena: numba, or torch where numba cannot run.

    ``steps``: of the arena's rows of 4 bits; None: the rows have 16 bits.
    """
    write = _compiled_write if reason_not_to_run(arena.shape[-1]) is None else write_rows
    write(arena, places, encoded, steps)


def _check_different(name: str, places: Tensor) -> None:
    ordered = places.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ValueError(f"{name}: expected rows that are all different, got a repeated one")


def _check_sources(arena: Tensor, rows: Tensor, bits_of_sources: Tensor, bits: int) -> None:
    allowed = [width for width in WIDTHS if width >= bits]
    wrong = bits_of_sources[~torch.isin(bits_of_sources, torch.tensor(allowed, dtype=torch.int8))]
    if wrong.numel():
        raise ValueError(f"source_bits: expected {' or '.join(map(str, allowed))}, got {int(wrong[0])}")
    for width in allowed:
        _check_rows("source_rows", rows[bits_of_sources == width], width, arena)


def _compiled_encode(encoding: Encoding) -> None:
    """:func:`encode_cpu`, compiled by numba."""
    from kvevict_kernels.recode_rows.numba_impl import calls

    arena, out, coding = encoding.arena, encoding.out, encoding.coding
    read = [0, 0, 0, 0]
    if coding is not None:
        found = coding.statistics
        mean, scale = (found.v_mean, found.v_scale) if encoding.is_v else (found.k_mean, found.k_scale)
        read = [
            x.data_ptr() for x in (mean, scale, rotation(arena.shape[-1], arena.device), coding.steps(encoding.is_v))
        ]
    encode, _, stamp = calls()
    sources = [x.contiguous() for x in (encoding.rows, encoding.bits_of_rows, encoding.runs)]
    encode(
        *(stamp, arena.data_ptr(), KINDS[arena.dtype], arena.shape[-1], *(x.data_ptr() for x in sources)),
        *(*read, encoding.bits, out.data_ptr(), out.shape[1], encoding.rows.numel()),
    )


def _compiled_write(arena: Tensor, rows: Tensor, encoded: Tensor, steps: Tensor | None) -> None:
    """:func:`kvevict_kernels.row_codec.write_rows`, compiled by numba."""
    from kvevict_kernels.recode_rows.numba_impl import calls

    _, write, stamp = calls()
    places = (arena.data_ptr(), arena.shape[-1], 0 if steps is None else steps.data_ptr(), rows.data_ptr())
    write(stamp, *places, encoded.data_ptr(), encoded.shape[1], rows.numel())


def _encode(encoding: Encoding) -> None:
    """:func:`encode_cpu` in torch."""
    arena, bits, coding = encoding.arena, encoding.bits, encoding.coding
    for width in (width for width in WIDTHS if width >= bits):
        for entries in torch.split((encoding.bits_of_rows == width).nonzero()[:, 0], CHUNK_ROWS):
            source = encoding.rows[entries].long()
            if width == bits:
                encoding.out[entries] = read_rows(arena, source, steps_of(coding, bits, encoding.is_v))
                continue
            assert coding is not None
            own = coding.statistics.of_runs(encoding.runs[entries])[encoding.is_v]
            encoding.out[entries] = encode_rows(arena.view(-1, arena.shape[-1])[source], *own)
