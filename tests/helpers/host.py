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
    ends = {(each.names[-1], key) for key, each in segments.items()}
    through = {(name, key) for key, each in segments.items() for name in each.names}
    for index, expected in ((host._ending, ends), (host._through, through)):
        assert {(name, key) for name, keys in index.items() for key in keys} == expected
