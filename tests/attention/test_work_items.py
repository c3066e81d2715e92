"""The split kernel's work items beside a list of them that is written out one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvevict_kernels.device_limits import DEPENDENT_ARCH, INTERPRETER, DeviceLimits, dependent_launch
from kvevict_kernels.ragged_decode.tables import Step, Tables
from sgl_kvevict.attention.triton.attention import TritonAttention

Item = tuple[int, ...]
NEW_LENS = [1, 3, 1, 1, 9, 1]
SMALL_CHUNKS = (16, 32)
"""Of the fixture ``small_chunks``, by class of q rows."""


def unpacked(items: Tensor) -> list[Item]:
    """Fields of every item: address, keys, member, readers and bits, tile and head, partial, last field."""
    halves = items.view(torch.int32).view(-1, 8).tolist()
    return [(word, *rest) for word, (_, _, *rest) in zip(items.view(-1, 4)[:, 0].tolist(), halves, strict=True)]


def with_bits(readers: int, bits: int) -> int:
    """Readers, and above them the bits of an item's rows."""
    return bits << 26 | readers


def of_spans(tables: Tables, which: int, layer: int) -> list[Item]:
    """What is to be in a layer's list, span after span, head after head, chunk after chunk, tile after tile."""
    heads, group = tables.sizes.num_kv_heads, tables.sizes.group_size
    found = []
    partial = 0
    spans = list({id(span): span for path in tables.paths for span in path}.values())
    for number, span in enumerate(spans):
        readers = int(tables.span_members[number])
        tiles = -(-readers * group // tables.sizes.decode_rows[which])
        for head in range(heads):
            length, start = int(span.lens[layer, head]), int(span.starts[layer, head])
            chunk = int(tables.span_chunk[number])
            while -(-length // chunk) > int(tables.span_cap[number]):
                chunk += int(tables.span_chunk[number])
            for begin in range(0, length, chunk):
                for tile in range(tiles if int(tables.span_class[number]) == which else 0):
                    address = span.rows[start + begin :].data_ptr()
                    keys = min(chunk, length - begin)
                    member = int(tables.span_member_start[number])
                    found.append(
                        (address, keys, member, with_bits(readers, span.bits), tile * heads + head, partial, number)
                    )
                partial += readers * group
    return found


def of_suffixes(tables: Tables, step: Step, which: int) -> list[Item]:
    """The same of the requests' own tokens; chunks before tiles, tiles before heads."""
    heads, group = tables.sizes.num_kv_heads, tables.sizes.group_size
    found = []
    for request in tables.classes[which].requests.tolist():
        new, compressed_len = tables.new_lens[request], int(tables.compressed_lens[request])
        row = step.req_to_token[int(step.pool_rows[request])]
        length = int(step.seq_lens[request]) - compressed_len
        chunk = SMALL_CHUNKS[which]
        while chunk * tables.sizes.num_items < length * heads:  # a long suffix gets no more items than fill the device
            chunk += 16
        partial = int(tables.suffix_partial[request])
        member = int(tables.request_members[request])
        for split, begin in enumerate(range(0, length, chunk)):
            for tile in range(-(-new * group // tables.sizes.decode_rows[which])):
                for head in range(heads):
                    first = partial + (split * heads + head) * new * group
                    left = length - begin
                    address = row[compressed_len + begin :].data_ptr()
                    found.append(
                        (address, min(chunk, left), member, with_bits(new, 16), tile * heads + head, first, left)
                    )
    return found


def planned(world) -> tuple[Tables, Step]:
    """Tables and lengths of the world's batch."""
    attention = TritonAttention(world.geometry, world.k, world.v)
    attention.plan(world.batch(NEW_LENS))
    found = attention._planned
    assert found is not None and found.step is not None
    return found.addresses.tables, found.step


@pytest.mark.usefixtures("interpreted", "small_chunks")
def test_items_are_those_of_their_runs_and_suffixes(make_world) -> None:
    """Both classes of q rows, empty runs, runs that are longer than most, several tiles, requests without a path."""
    world = make_world(2, 4, 16, num_token_slots=1200, num_layers=3)
    shared, deep = world.uneven_span(60), world.uneven_span(20)
    long = world.span(torch.tensor([[3, 400], [0, 1], [30, 0]], dtype=torch.int32), num_tokens=500)
    for path, own in (
        ((shared,), 40),
        ((shared, deep), 9),
        ((long,), 1),
        ((), 70),
        ((shared,), 20),
        ((shared, long), 5),
    ):
        world.add(path, own)
    tables, step = planned(world)
    sizes = []
    for which, of_class in enumerate(tables.classes):
        for layer in range(world.geometry.num_layers):
            count = int(of_class.item_count[layer])
            assert unpacked(of_class.items[layer][:count]) == of_spans(tables, which, layer)
            sizes.append(count)
        count = int(step.item_start[which][-1])
        assert unpacked(step.items[which][:count]) == of_suffixes(tables, step, which)
        sizes.append(count)
    assert all(sizes), "every list has items"


def test_the_merge_is_launched_early_where_the_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for arch, can in ((80, False), (89, False), (90, True), (100, True), (120, True)):
        limits = DeviceLimits(arch, num_sms=1, shared_per_sm=102400)
        monkeypatch.setattr("kvevict_kernels.device_limits.limits_of", lambda device, found=limits: found)
        want = {"PDL": True, "launch_pdl": True} if can else {"PDL": False}
        assert dependent_launch(torch.device("cuda")) == want
    assert INTERPRETER.arch >= DEPENDENT_ARCH
    assert dependent_launch(torch.device("cpu")) == {"PDL": False}
