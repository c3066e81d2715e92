"""Encode K and V rows in 4 bits, or move rows that have 4 bits: within their arenas, or out of them and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvevict_kernels.checks import KV_DTYPES, check_index_range, check_tensor
from kvevict_kernels.dispatch import implementation
from kvevict_kernels.row_codec import RowCoding, check_coding, encode_rows, read_rows, rotation, write_rows
from kvevict_kernels.row_sizes import ROWS_PER_SLOT, WIDTHS, row_bytes
from kvevict_kernels.span_attention import reason_not_to_run
from kvevict_kernels.span_attention.call import KINDS

__all__ = ["encoded_rows", "recode_rows", "temporary_bytes", "write_encoded"]

WIDE, NARROW = WIDTHS
CHUNK_ROWS = 4096
"""Rows of which the CPU path has float32 copies at a time."""


@dataclass(frozen=True)
class Encoding:
    """Rows of one arena to be written with 4 bits, one after the other; see :func:`recode_rows`."""

    arena: Tensor
    is_v: int  # 1 for values, 0 for keys
    rows: Tensor  # [n], int32, row numbers to read
    bits: int  # 16 or 4, of the rows that are read
    runs: Tensor  # [n], int32
    coding: RowCoding
    out: Tensor  # [n, row_bytes], uint8, where they are written


def temporary_bytes(arena: Tensor, num_rows: int) -> int:
    """Bytes of the temporary of :func:`recode_rows`: the rows of one arena, encoded."""
    return num_rows * row_bytes(NARROW, arena.shape[-1])


def recode_rows(
    k_arena: Tensor,
    v_arena: Tensor,
    source_rows: Tensor,
    bits: int,
    runs: Tensor,
    places: Tensor,
    coding: RowCoding,
    temporary: Tensor | None = None,
) -> None:
    """Write rows of both arenas to new places, in 4 bits.

    Rows that have 4 bits keep their bytes. What is read is the content before the call: sources and places may overlap
    in any way.

    Args:
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], bfloat16 or float16.
        v_arena: like ``k_arena``.
        source_rows: [n], int32, row numbers to read, of the sources' width; may repeat.
        bits: 16 or 4, of the rows to read.
        runs: [n], int32, ``layer * num_kv_heads + head`` of each entry, by which it is normalised.
        places: [n], int32, numbers of rows of 4 bits to write, all different.
        coding: of the arenas' rows of 4 bits.
        temporary: [:func:`temporary_bytes` or more], uint8, on the arenas' device; None: it is allocated. Nothing is
            written to the arenas before it is. (On a CPU copies of it are made beside it.)

    Raises:
        ValueError: wrong shape, dtype, device or bits; a coding that does not fit the arena; on the CPU also a row or
            run outside of the arena, or a place that repeats.

    Source: see ``row_codec.py``.
    Cost: reads and writes n rows of K, then of V, and writes and reads them once more in the temporary, as they are
        encoded; no float copy of more than a few thousand rows; two launches per arena on a device, no host sync;
        deterministic, no atomics. The temporary is not cut into chunks: an entry's place may hold the source of any
        other, and which of them only the device knows.
    """
    device = k_arena.device
    _check_sources(k_arena, v_arena, source_rows, bits, runs, coding)
    _check_rows("places", places, NARROW, k_arena)
    if places.numel() != source_rows.numel():
        raise ValueError(f"places: expected {source_rows.numel()} rows, as many as source_rows, got {places.numel()}")
    if device.type == "cpu":
        _check_different(places)
    needed = temporary_bytes(k_arena, places.numel())
    if temporary is None:
        temporary = torch.empty(needed, dtype=torch.uint8, device=device)
    check_tensor("temporary", temporary, (None,), torch.uint8, device)
    if temporary.numel() < needed:
        raise ValueError(f"temporary: expected {needed} bytes, got {temporary.numel()}")
    staged = temporary[:needed].view(-1, row_bytes(NARROW, k_arena.shape[-1]))
    encode = implementation(device, encode_cpu, "recode_rows")
    write = implementation(device, write_rows, "recode_rows")
    for is_v, arena in enumerate((k_arena, v_arena)):
        encode(Encoding(arena, is_v, source_rows, bits, runs, coding, staged))
        write(arena, places, staged, coding.steps(is_v))


def encoded_rows(
    k_arena: Tensor, v_arena: Tensor, source_rows: Tensor, bits: int, runs: Tensor, coding: RowCoding
) -> tuple[Tensor, Tensor]:
    """Copy rows out of both arenas, encoded in 4 bits: what :func:`recode_rows` writes to its places.

    Arguments and errors are those of :func:`recode_rows`.

    Returns:
        Rows of K and of V, [n, :func:`~kvevict_kernels.row_sizes.row_bytes`], uint8.

    Cost: reads the rows and writes them encoded, without a float copy; one launch per arena on a device, no host sync.
    """
    _check_sources(k_arena, v_arena, source_rows, bits, runs, coding)
    shape = (source_rows.numel(), row_bytes(NARROW, k_arena.shape[-1]))
    k, v = (torch.empty(shape, dtype=torch.uint8, device=source_rows.device) for _ in "kv")
    encode = implementation(source_rows.device, encode_cpu, "recode_rows")
    for is_v, (arena, out) in enumerate(((k_arena, k), (v_arena, v))):
        encode(Encoding(arena, is_v, source_rows, bits, runs, coding, out))
    return k, v


def write_encoded(k_arena: Tensor, v_arena: Tensor, places: Tensor, k: Tensor, v: Tensor, coding: RowCoding) -> None:
    """Write rows of 4 bits, as :func:`encoded_rows` returns them, to places of both arenas.

    Other arguments, and errors, are those of :func:`recode_rows`.
    """
    _check_arenas(k_arena, v_arena, coding)
    _check_rows("places", places, NARROW, k_arena)
    shape = (places.numel(), row_bytes(NARROW, k_arena.shape[-1]))
    check_tensor("k", k, shape, torch.uint8, k_arena.device)
    check_tensor("v", v, shape, torch.uint8, k_arena.device)
    if places.device.type == "cpu":
        _check_different(places)
    write = implementation(places.device, write_rows, "recode_rows")
    write(k_arena, places, k, coding.k_steps)
    write(v_arena, places, v, coding.v_steps)


def _check_arenas(k_arena: Tensor, v_arena: Tensor, coding: RowCoding) -> None:
    check_tensor("k_arena", k_arena, (None, None, None, None), KV_DTYPES)
    check_tensor("v_arena", v_arena, tuple(k_arena.shape), k_arena.dtype, k_arena.device)
    check_coding(k_arena, coding)


def _check_rows(name: str, rows: Tensor, bits: int, arena: Tensor) -> None:
    check_tensor(name, rows, (None,), torch.int32, arena.device)
    check_index_range(name, rows, arena.shape[:3].numel() * ROWS_PER_SLOT[bits])


def _check_sources(
    k_arena: Tensor, v_arena: Tensor, source_rows: Tensor, bits: int, runs: Tensor, coding: RowCoding
) -> None:
    _check_arenas(k_arena, v_arena, coding)
    if bits not in WIDTHS:
        raise ValueError(f"bits: expected 16 or 4, got {bits}")
    _check_rows("source_rows", source_rows, bits, k_arena)
    check_tensor("runs", runs, (source_rows.numel(),), torch.int32, k_arena.device)
    check_index_range("runs", runs, k_arena.shape[0] * k_arena.shape[2])


def _check_different(places: Tensor) -> None:
    ordered = np.sort(places.numpy())  # by vector instructions, which torch's sort does not have
    if (ordered[1:] == ordered[:-1]).any():
        raise ValueError("places: expected rows that are all different, got a repeated one")


def encode_cpu(encoding: Encoding) -> None:
    """Write the encoded rows: numba, or torch where numba cannot run."""
    arena, coding, head_dim = encoding.arena, encoding.coding, encoding.arena.shape[-1]
    if encoding.bits == NARROW:
        encoding.out.copy_(read_rows(arena, encoding.rows, coding.steps(encoding.is_v)))
        return
    if reason_not_to_run(head_dim) is None:
        from kvevict_kernels.recode_rows.numba_impl import encode

        found = coding.statistics
        mean, scale = (found.v_mean, found.v_scale) if encoding.is_v else (found.k_mean, found.k_scale)
        given = (arena, encoding.rows, encoding.runs, mean, scale, rotation(head_dim, arena.device), encoding.out)
        # PyTorch's number of threads, so that its runtime keeps its team.
        sizes = KINDS[arena.dtype], head_dim, encoding.rows.numel()
        encode(*sizes, [x.data_ptr() for x in given], torch.get_num_threads())
        return
    chunks = (torch.split(x, CHUNK_ROWS) for x in (encoding.rows.long(), encoding.runs, encoding.out))
    for rows, runs, out in zip(*chunks, strict=True):
        own = coding.statistics.of_runs(runs, is_v=bool(encoding.is_v))
        out.copy_(encode_rows(arena.view(-1, head_dim)[rows], *own))
