"""What must always hold of the host's memory."""

from __future__ import annotations

from collections import Counter

from sgl_kvevict.store.host import HostSegments


def check_host(host: HostSegments) -> None:
    """Every block has exactly one owner, there are no others, and what is found is there."""
    segments = host._segments
    assert host._arena.shape == (host.num_blocks, host.block_bytes)
    held = Counter(host._free)
    for key, segment in segments.items():
        assert segment.record.key == key and segment.blocks
        held.update(segment.blocks)
    assert held == Counter(range(host.num_blocks))
    assert host.used_bytes == sum(len(each.blocks) for each in segments.values()) * host.block_bytes
    assert host._num_spare == sum(len(each.blocks) for each in segments.values() if each.in_pool)
    listed = {(name, key) for key, each in segments.items() for name in each.names}
    assert {(name, key) for name, entries in host._index.items() for key in entries} == listed
