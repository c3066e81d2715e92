"""What must always hold of the host's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest

import torch

from sgl_kvevict.segments.segment import Segment
from sgl_kvevict.store.host import ALIGNMENT, HostSegments


def check_host(host: HostSegments, in_pool: Iterable[Segment] = ()) -> None:
    """Every block has exactly one owner, there are no others, what lies in them fits, and what is found is there.

    So all copies together never take more bytes than the memory has. No entry of a segment, here or in the pool, is
    evicted, too, or evicted twice.
    """
    segments = host._segments
    assert host._arena.shape == (host.num_blocks, host.block_bytes)
    held = Counter(host._free)
    for key, segment in segments.items():
        assert segment.record.key == key and segment.copy.blocks
        held.update(segment.copy.blocks)
    for part in host.evicted:
        assert part.blocks and not part.is_cut
        held.update(part.blocks)
    assert held == Counter(range(host.num_blocks))
    copies = [each.copy for each in segments.values()] + list(host.evicted)
    assert host.used_bytes == sum(len(copy.blocks) for copy in copies) * host.block_bytes
    assert 0 <= host.used_bytes <= host.num_blocks * host.block_bytes == host._arena.nbytes
    paths = [each.record.tokens for each in segments.values()]
    for one, beside in zip_longest(copies, paths):
        tensors = [*one.shapes.values(), *([] if beside is None else [beside])]
        taken = sum(-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in tensors)
        assert taken <= len(one.blocks) * host.block_bytes
    spare = [each.copy for each in segments.values() if each.in_pool] + list(host.evicted)
    assert host._num_spare == sum(len(copy.blocks) for copy in spare)
    assert host._num_loose == sum(each.loose for each in segments.values() if not each.in_pool)
    first = min((each.place for each in segments.values()), default=None)
    assert (found.place if (found := host._first()) else None) == first
    listed = {(name, key) for key, each in segments.items() for name in each.names}
    assert {(name, key) for name, entries in host._index.items() for key in entries} == listed
    blocks, has = {id(part.blocks) for part in host.evicted}, []
    for each in in_pool:
        rows = each.packed.rows
        assert rows.positions.ge(each.sink_end).all()
        assert each.live_count == rows.positions.lt(each.live_end).sum()
        parts = [part.within(each.start, each.live_end) for part in each.evicted]
        has.append((rows.indptr.diff(), rows.positions, parts))
    for copy in host._segments.values():
        read, own = host._read(copy.copy), copy.record
        assert all(own.start <= part.start < part.end <= own.end for part in own.parts)
        has.append((read["rows.keep_lens"], read["rows.positions"], list(own.parts)))
    for lens, positions, parts in has:
        all_runs = [(lens, positions)]
        for part in (part for part in parts if part.blocks):
            gone = HostSegments.get_evicted(host, part)  # not what a test has put in its place
            assert id(part.blocks) in blocks
            assert (gone.positions.ge(part.start) & gone.positions.lt(part.end)).all()
            all_runs.append((gone.keep_lens, gone.positions))
        coded = [torch.repeat_interleave(lens.flatten().long()) << 32 | positions for lens, positions in all_runs]
        assert all(one.diff().gt(0).all() for one in coded)
        assert torch.cat(coded).unique().numel() == sum(one.numel() for one in coded)
