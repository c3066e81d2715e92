"""What must always hold of the host's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from helpers.decisions import run_of_entries
from sgl_kvevict.cache.complements import Complements
from sgl_kvevict.cache.records import PrefixTable
from sgl_kvevict.store.host import ALIGNMENT, EvictedPart, HostSegments


def check_host(host: HostSegments, holders: Iterable[EvictedPart] = ()) -> None:
    """Every block has exactly one owner, there are no others, what lies in them fits, and what is found is there.

    So all copies together never take more bytes than the memory has.

    ``holders``: evicted parts that segments in the pool hold.
    """
    segments = host._segments
    assert host._arena.shape == (host.num_blocks, host.block_bytes)
    held = Counter(host._free)
    for key, segment in segments.items():
        assert segment.record.key == key and segment.copy.blocks
        held.update(segment.copy.blocks)
    evicted = Counter(part.copy for part in [*holders, *(each for one in segments.values() for each in one.evicted)])
    assert all(copy.num_holders == count for copy, count in evicted.items())
    assert {copy for copy in evicted if copy.blocks} == host.evicted.keys()
    for copy in host.evicted:
        held.update(copy.blocks)
    assert held == Counter(range(host.num_blocks))
    copies = [each.copy for each in segments.values()] + list(host.evicted)
    assert host.used_bytes == sum(len(copy.blocks) for copy in copies) * host.block_bytes
    assert 0 <= host.used_bytes <= host.num_blocks * host.block_bytes == host._arena.nbytes
    for one in copies:
        taken = sum(-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in one.shapes.values())
        assert taken <= len(one.blocks) * host.block_bytes
    spare = [each.copy for each in segments.values() if each.in_pool] + list(host.evicted)
    assert host._num_spare == sum(len(copy.blocks) for copy in spare)
    assert host._path_bytes == sum(each.record.tokens.nbytes for each in segments.values()) <= host._arena.nbytes
    listed = {(name, key) for key, each in segments.items() for name in each.names}
    assert {(name, key) for name, entries in host._index.items() for key in entries} == listed


def check_complements(complements: Complements, table: PrefixTable) -> None:
    """No entry of a segment is in the pool and evicted, or evicted twice, and evicted ones are of its tokens."""
    assert complements._of.keys() <= table.packed.keys()
    for segment, of_segment in complements._of.items():
        held = segment.packed.rows
        assert of_segment and held.positions.ge(segment.sink_end).all()
        parts = [run_of_entries(held.indptr) << 32 | held.positions]
        for evicted in of_segment:
            assert segment.start <= evicted.start < evicted.end <= segment.end
            if not evicted.is_lost:
                rows = Complements.get(complements, evicted)  # not what a test has put in its place
                runs = torch.repeat_interleave(rows.keep_lens.flatten().long())
                assert rows.positions.ge(evicted.start).all() and rows.positions.lt(evicted.end).all()
                by_run = torch.split(rows.positions, rows.keep_lens.flatten().tolist())
                assert all(own.diff().gt(0).all() for own in by_run)
                parts.append(runs << 32 | rows.positions)
        entries = torch.cat(parts)
        assert entries.unique().numel() == entries.numel()
