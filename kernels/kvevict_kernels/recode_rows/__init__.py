"""Move K and V rows to other places in their arenas, in rows of as many or fewer bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvevict_kernels.checks import KV_DTYPES, check_index_range, check_tensor
from kvevict_kernels.dispatch import implementation
from kvevict_kernels.row_codec import (
    WIDTHS,
    RowStatistics,
    check_statistics,
    decode_normalised,
    encode_normalised,
    normalised,
    read_rows,
    row_bytes,
    rows_per_slot,
    write_rows,
)
from kvevict_kernels.span_attention import reason_not_to_run
from kvevict_kernels.span_attention.call import KINDS

__all__ = ["recode_rows"]

CHUNK_ROWS = 4096
"""Rows of which the CPU path has float32 copies at a time."""

Target = tuple[Tensor, int]
"""Row numbers [n], int32, and the bits of these rows."""


def recode_rows(
    k_arena: Tensor,
    v_arena: Tensor,
    source_rows: Tensor,
    source_bits: Tensor,
    runs: Tensor,
    targets: Sequence[Target],
    statistics: RowStatistics | None,
) -> None:
    """Copy rows of both arenas to new places, and encode them in the bits of their place.

    The entries are those of all ``targets``, one after the other. An entry whose place has the bits of its source keeps
    its bytes; one of 8 bits is encoded in 4 from its normalised numbers. What is read is the content before the call:
    sources and targets may overlap in any way.

    Args:
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], bfloat16, float16 or float32.
        v_arena: like ``k_arena``.
        source_rows: [n], int32, row numbers to read, of each entry's width; may repeat.
        source_bits: [n], int8, 16, 8 or 4: bits of each row to read.
        runs: [n], int32, ``layer * num_kv_heads + head`` of each entry, by which it is normalised.
        targets: row numbers to write, all different, and their bits, none above those of the entry's source; together
            n rows. A place of each number of bits; rows of different widths do not overlap.
        statistics: of the model; None: no entry changes its bits.

    Raises:
        ValueError: wrong shape, dtype, device or bits; statistics that do not fit the arena, or none where bits change;
            on the CPU also a row or run outside of the arena, a target row that repeats, or bits that would grow.

    Source: groups with scale and minimum as KIVI (arXiv 2402.02750) has for values; statistics of the model: this
        project.
    Cost: reads and writes n rows of K and of V, and writes and reads them once more in a temporary as they are encoded;
        no float copy of more than a few thousand rows; two launches per target on a device, no host sync;
        deterministic, no atomics.
    """
    check_tensor("k_arena", k_arena, (None, None, None, None), KV_DTYPES)
    device = k_arena.device
    check_tensor("v_arena", v_arena, tuple(k_arena.shape), k_arena.dtype, device)
    check_tensor("source_rows", source_rows, (None,), torch.int32, device)
    num_entries = source_rows.numel()
    check_tensor("source_bits", source_bits, (num_entries,), torch.int8, device)
    check_tensor("runs", runs, (num_entries,), torch.int32, device)
    check_statistics(k_arena, statistics)
    check_index_range("runs", runs, k_arena.shape[0] * k_arena.shape[2])
    num_head_slots = k_arena.shape[:3].numel()
    for rows, bits in targets:
        if bits not in WIDTHS:
            raise ValueError(f"targets: expected rows of 16, 8 or 4 bits, got {bits}")
        if bits != WIDTHS[0] and statistics is None:
            raise ValueError(f"statistics: rows of {bits} bits need some, got None")
        check_tensor("targets", rows, (None,), torch.int32, device)
        check_index_range("targets", rows, num_head_slots * rows_per_slot(bits, k_arena.element_size()))
    if sum(rows.numel() for rows, _ in targets) != num_entries:
        counts = [rows.numel() for rows, _ in targets]
        raise ValueError(f"targets: expected {num_entries} rows, as many as source_rows, got {counts}")
    if num_entries:
        run = implementation(device, recode_rows_cpu, "recode_rows")
        run(k_arena, v_arena, source_rows, source_bits, runs, targets, statistics)


def recode_rows_cpu(
    k_arena: Tensor,
    v_arena: Tensor,
    source_rows: Tensor,
    source_bits: Tensor,
    runs: Tensor,
    targets: Sequence[Target],
    statistics: RowStatistics | None,
) -> None:
    """CPU path of :func:`recode_rows`: loops compiled by numba, or torch where numba cannot run.

    Raises:
        ValueError: a target row repeats, a source row is outside of the arena, or bits would grow.
    """
    counts = [rows.numel() for rows, _ in targets]
    parts = list(zip(*(torch.split(x, counts) for x in (source_rows, source_bits, runs)), targets, strict=True))
    for rows, bits_of_sources, _, (places, bits) in parts:
        _check_part(k_arena, rows, bits_of_sources, places, bits)
    encode, write = _compiled_encode, _compiled_write
    if reason_not_to_run(k_arena.shape[-1]) is not None:
        encode, write = _encoded, write_rows
    for is_v, arena in enumerate((k_arena, v_arena)):
        encoded = [
            encode(arena, is_v, rows, bits_of_sources, own_runs, bits, statistics)
            for rows, bits_of_sources, own_runs, (_, bits) in parts
        ]
        for (places, bits), written in zip(targets, encoded, strict=True):
            write(arena, places, bits, written)


def _check_part(arena: Tensor, rows: Tensor, bits_of_sources: Tensor, places: Tensor, bits: int) -> None:
    ordered = places.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ValueError("targets: expected rows that are all different, got a repeated one")
    allowed = [width for width in WIDTHS if width >= bits]
    wrong = bits_of_sources[~torch.isin(bits_of_sources, torch.tensor(allowed, dtype=torch.int8))]
    if wrong.numel():
        raise ValueError(f"source_bits: expected {' or '.join(map(str, allowed))}, got {int(wrong[0])}")
    for width in allowed:
        size = arena.shape[:3].numel() * rows_per_slot(width, arena.element_size())
        check_index_range("source_rows", rows[bits_of_sources == width], size)


def _compiled_encode(
    arena: Tensor,
    is_v: int,
    rows: Tensor,
    bits_of_sources: Tensor,
    runs: Tensor,
    bits: int,
    statistics: RowStatistics | None,
) -> Tensor:
    """:func:`_encoded`, compiled by numba."""
    from kvevict_kernels.recode_rows.numba_impl import calls

    head_dim = arena.shape[-1]
    out = torch.empty(rows.numel(), row_bytes(bits, head_dim, arena.element_size()), dtype=torch.uint8)
    both = [0, 0]
    if statistics is not None:
        of_k, of_v = (statistics.k_mean, statistics.k_deviation), (statistics.v_mean, statistics.v_deviation)
        both = [x.data_ptr() for x in (of_v if is_v else of_k)]
    encode, _, stamp = calls()
    sources = (x.contiguous() for x in (rows, bits_of_sources, runs))
    encode(
        *(stamp, arena.data_ptr(), KINDS[arena.dtype], head_dim, *(x.data_ptr() for x in sources)),
        *(*both, bits, out.data_ptr(), out.shape[1], rows.numel()),
    )
    return out


def _compiled_write(arena: Tensor, rows: Tensor, bits: int, encoded: Tensor) -> None:
    """:func:`kvevict_kernels.row_codec.write_rows`, compiled by numba."""
    from kvevict_kernels.recode_rows.numba_impl import calls

    _, write, stamp = calls()
    places = (arena.data_ptr(), arena.shape[-1], bits, rows.data_ptr())
    write(stamp, *places, encoded.data_ptr(), encoded.shape[1], rows.numel())


def _encoded(
    arena: Tensor,
    is_v: int,
    rows: Tensor,
    bits_of_sources: Tensor,
    runs: Tensor,
    bits: int,
    statistics: RowStatistics | None,
) -> Tensor:
    """Bytes of rows of one arena in ``bits`` bits, [n, row_bytes]."""
    head_dim = arena.shape[-1]
    out = torch.empty(rows.numel(), row_bytes(bits, head_dim, arena.element_size()), dtype=torch.uint8)
    for width in (width for width in WIDTHS if width >= bits):
        for entries in torch.split((bits_of_sources == width).nonzero()[:, 0], CHUNK_ROWS):
            source = rows[entries].long()
            if width == bits:
                out[entries] = read_rows(arena, source, bits)
                continue
            if width == WIDTHS[0]:
                assert statistics is not None
                own = statistics.of_runs(runs[entries])[is_v]
                numbers = normalised(arena.view(-1, head_dim)[source], *own)
            else:
                numbers = decode_normalised(read_rows(arena, source, width), width)
            out[entries] = encode_normalised(numbers, bits)
    return out
