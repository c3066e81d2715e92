"""Segments in blocks of the host's memory: contents, what is found, what goes first."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise

import pytest
import torch
from torch.overrides import TorchFunctionMode

from helpers.host import check_host
from helpers.stored import MIN_PREFIX, SHADOW, assert_same, identity, record, tokens
from sgl_kvevict.copies import CopiedEntries
from sgl_kvevict.store.host import HostSegments

OURS = identity()
NAMES = OURS.namespace(None, None)
CPU = torch.device("cpu")
ENTRIES = record(OURS, NAMES, tokens(40)).kept.rows


def host(num_blocks=100, block_bytes=64, own=OURS) -> HostSegments:
    return HostSegments(torch.empty(num_blocks, block_bytes, dtype=torch.uint8), CPU, own)


def found(segments: HostSegments, path, namespace=NAMES):
    return {(same, entry.start, entry.end) for same, entry in segments.find(path, namespace)}


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16", "torch.float16", "torch.float8_e4m3fn"])
@pytest.mark.parametrize("block_bytes", [8, 64, 10_000])
def test_every_field_comes_back(dtype, block_bytes):
    own = identity(dtype=dtype)
    names, path = own.namespace("tenant", "salt"), tokens(40)
    segments = host(20_000 // block_bytes, block_bytes, own)
    for ours in (
        record(own, names, path),
        record(own, names, path, start=20),
        record(own, names, path[:30], shadow=SHADOW),
    ):
        assert segments.put(ours, names) > 0
        check_host(segments)
        assert_same(segments.get(ours.key), ours)


class Copies(TorchFunctionMode):
    """Counts the copies that are made."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.Tensor.copy_
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("more", [0, 5])
def test_neighbouring_blocks_are_one_copy(more):
    """In a memory with gaps, too; contents are the same. Another rank may need some blocks more."""
    paths = [tokens(20 + 4 * number, seed=number) for number in range(5)]
    ours = [record(OURS, NAMES, path, seed=number) for number, path in enumerate(paths)]
    ample = host()
    sizes = [ample.put(each, NAMES) // ample.block_bytes for each in ours]
    segments = host(sum(sizes) + 5 * more + 2)
    segments.largest = lambda number: number + more
    for each, size in zip(ours, sizes, strict=True):
        with Copies() as copies:
            assert segments.put(each, NAMES) == (size + more) * segments.block_bytes
        assert copies.count == 1
        with Copies() as copies:
            assert_same(segments.get(each.key), each)
        assert copies.count == 1
    for number in (3, 1):  # their blocks are free, those between are not
        assert segments.delete(ours[number].key)
    segments.largest = lambda number: number
    wide = dataclasses.replace(SHADOW, k=SHADOW.k.repeat(1, 4), v=SHADOW.v.repeat(1, 4))
    large = record(OURS, NAMES, tokens(44, seed=7), seed=7, shadow=wide)
    with Copies() as copies:
        assert segments.put(large, NAMES) > 0
    check_host(segments)
    blocks = segments._segments[large.key].copy.blocks
    blocks = blocks[: len(blocks) - 8 * 44 // 64]  # its path's tokens count, and lie elsewhere
    num_ranges = 1 + sum(after != before + 1 for before, after in pairwise(blocks))
    assert 1 < num_ranges == copies.count < len(blocks)
    for each in (large, ours[0], ours[2], ours[4]):
        assert_same(segments.get(each.key), each)


def test_a_prompt_finds_segments_on_its_path():
    segments, path = host(1000), tokens(100)
    for start, end in ((0, 50), (50, 90), (90, 100)):
        segments.put(record(OURS, NAMES, path[:end], start), NAMES)
    assert found(segments, path) == {(50, 0, 50), (90, 50, 90), (100, 90, 100)}
    assert found(segments, [*path[:60], *tokens(30, seed=1)]) == {(50, 0, 50)}  # less than half of the second
    assert found(segments, [*path[:85], *tokens(30, seed=1)]) == {(50, 0, 50), (85, 50, 90)}
    assert found(segments, path[: MIN_PREFIX - 1]) == set()
    assert found(segments, tokens(100, seed=1)) == set()
    assert found(segments, path, OURS.namespace("tenant", None)) == set()


def test_many_segments_behind_one_header_are_found_quickly_and_whole():
    segments, header = host(20_000), tokens(48)
    paths = [header + tokens(24, seed=seed) for seed in range(1, 200)]
    for path in paths:
        segments.put(record(OURS, NAMES, path), NAMES)
    for path in paths:
        assert (72, 0, 72) in found(segments, path)
    others = segments.find(header + tokens(40, seed=999), NAMES)
    assert len(others) == 64 and {entry.key for _, entry in others} == {NAMES.segment(path, 0) for path in paths[-64:]}


def test_what_covers_a_path():
    segments, path = host(1000), tokens(100)
    segments.put(record(OURS, NAMES, path[:90]), NAMES)
    assert segments.covering(path[:90], 0, NAMES) is segments.covering(path[:80], 30, NAMES) is not None
    assert segments.covering(path[:60], 30, NAMES) is None  # too little of it to be loaded for that
    assert segments.covering(path, 0, NAMES) is None
    assert segments.covering([*path[:59], 2000], 0, NAMES) is None
    whole = tokens(60, seed=1)
    segments.put(record(OURS, NAMES, whole, splittable=False), NAMES)
    assert segments.covering(whole, 0, NAMES) is not None and segments.covering(whole[:50], 0, NAMES) is None


def test_what_saves_least_per_byte_and_was_unused_longest_goes_first():
    one, segments = record(OURS, NAMES, tokens(40)), host(2, 2048)  # each takes one block
    others = [record(OURS, NAMES, tokens(length, seed=length)) for length in (41, 60, 61)]
    for each in (one, others[0]):
        segments.put(each, NAMES)
    segments.use(one.key)
    segments.put(others[1], NAMES)  # `one` saves least: 40 tokens
    assert segments.get(one.key) is None and segments.get(others[0].key) is not None
    segments.put(others[2], NAMES)
    assert segments.get(others[0].key) is None and len(segments) == 2 and segments.num_evicted == 2
    for seed in range(5):  # nothing stays for good: the level rises
        segments.put(record(OURS, NAMES, tokens(50, seed=seed)), NAMES)
    assert segments.get(others[1].key) is None and segments.get(others[2].key) is None
    check_host(segments)


def test_a_segment_shrinks_in_steps_before_it_goes():
    ours, other = record(OURS, NAMES, tokens(40), shadow=SHADOW), record(OURS, NAMES, tokens(30, seed=1))
    order = torch.randperm(ENTRIES.num_entries, dtype=torch.int16)
    rows = dataclasses.replace(ours.kept.rows, order=order)
    ours = dataclasses.replace(ours, kept=CopiedEntries(rows))
    segments = host((host().put(ours, NAMES) + host().put(other, NAMES)) // 64 - 2)
    segments.sizes = lambda there: [100, 12, 6] if there.key == ours.key else []
    segments.put(ours, NAMES)
    segments.put(other, NAMES)
    check_host(segments)
    left = segments.get(ours.key)
    for number in (12, 6):
        best = order.argsort(descending=True)[:number].sort().values
        assert left.kept.rows.order.equal(order[best]) and left.kept.rows.k.equal(rows.k[best])
        runs = torch.repeat_interleave(rows.keep_lens.flatten().long())[best]
        assert left.kept.rows.keep_lens.flatten().equal(runs.bincount(minlength=4).int())
        assert segments.num_evicted == 0 and left.shadow.paid.equal(SHADOW.paid)
        assert [bool(part.blocks) for part in left.parts] == [False] * (2 - number // 12)
        segments._evict()
        check_host(segments)
        left = segments.get(ours.key)
    assert left is None and segments.num_evicted == 1 and segments.get(other.key) is not None


def test_what_does_not_fit_is_not_taken():
    segments = host(3)
    assert segments.put(record(OURS, NAMES, tokens(40)), NAMES) == 0
    assert len(segments) == 0 and segments.used_bytes == 0


def test_tokens_of_long_paths_take_no_more_memory_than_the_blocks():
    """Many short segments behind one long text."""
    text = tokens(1000)
    size = host(1000).put(record(OURS, NAMES, [*text, *tokens(20)], start=1000), NAMES)
    segments = host(8 * 1020 * 5, 1)  # blocks for many more than five
    assert 8 * 1020 < size < 8 * 1020 * 5 // 4
    (short,) = segments.put_evicted(ENTRIES, 0, 40)
    ours = [record(OURS, NAMES, [*text, *tokens(20, seed=seed)], start=1000) for seed in range(12)]
    for each in ours:
        assert segments.put(each, NAMES) > 0
        check_host(segments)
    assert [segments.get(each.key) is not None for each in ours] == [False] * 8 + [True] * 4
    assert segments.num_evicted == 8 and not short.blocks
    assert segments.put(record(OURS, NAMES, tokens(5101)), NAMES) == 0
    check_host(segments)


def test_without_memory_for_a_copy_everything_stays_as_it_is(monkeypatch):
    """A copy is gathered on the pool's device, which may be full, too; every block still has an owner afterwards."""
    segments, ours = host(), record(OURS, NAMES, tokens(40))
    (part,) = segments.put_evicted(ENTRIES, 0, 40)
    segments.put(ours, NAMES)

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", fail)
        with pytest.raises(MemoryError):
            segments.put(ours, NAMES)
        with pytest.raises(MemoryError):
            segments.put_evicted(ENTRIES, 0, 40)
    check_host(segments)
    assert_same(segments.get(ours.key), ours)
    assert segments.get_evicted(part).positions.equal(ENTRIES.positions)


def test_memory_is_bounded_after_many_moves():
    rng = random.Random(0)
    segments = host(60, 128)
    bytes_there, paths = segments._arena.nbytes, [tokens(rng.randrange(16, 80), seed) for seed in range(50)]
    records = [record(OURS, NAMES, path, rng.choice([0, 0, len(path) // 2])) for path in paths]
    for step in range(20_000):
        ours = rng.choice(records)
        move = rng.choice(["put", "put", "get", "use", "delete"])
        if move == "put":
            segments.put(dataclasses.replace(ours), NAMES)
        elif move == "get" and (theirs := segments.get(ours.key)) is not None:
            assert_same(theirs, ours)
        elif move == "use":
            segments.use(ours.key, in_pool=rng.random() < 0.5)
        elif move == "delete" and rng.random() < 0.1:
            segments.delete(ours.key)
        if step % 100 == 0:
            check_host(segments)
        assert segments.used_bytes <= bytes_there == 60 * 128
    assert segments.num_evicted > 1000
