"""Requests are known by what they are, never by what clients call them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.harness import WINDOWS, Harness
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.sglang_adapter.attention_backend import BatchReaders, after_init_new, readers_of

BASES = ([i * 7 % 11 for i in range(60)], [i * 5 % 7 for i in range(60)])


@pytest.mark.parametrize("windows", [(), WINDOWS])
def test_two_requests_of_one_name_read_their_own_prefixes(windows):
    """Live ones, of other texts in other namespaces; the harness reads back what each forward reads, byte for byte."""
    harness = Harness(num_slots=400, windows=windows)
    for base, extra_key in zip(BASES, ("a", "b"), strict=True):
        harness.finish(harness.run([*base, 1], extra_key))
    first, second = (harness.request([*base, 2, 3, 4], key) for base, key in zip(BASES, ("a", "b"), strict=True))
    second.rid = first.rid
    assert harness.admit(first) and harness.admit(second)
    assert harness.prefill(first, 61) and harness.prefill(second, 62)
    assert harness.prefill(first) and harness.prefill(second)
    for _ in range(3):
        assert harness.decode(first) and harness.decode(second)
    harness.retract(first)
    assert harness.decode(second)
    assert harness.admit(first) and harness.prefill(first)
    harness.finish(second)
    assert harness.decode(first)
    harness.finish(first)
    assert harness.allocator.available_size() + harness.tree.evictable_size() == harness.num_slots


def test_a_forward_carries_its_requests_and_a_view_of_it_too():
    reqs = [SimpleNamespace(rid="same"), SimpleNamespace(rid="same")]
    forward = SimpleNamespace(rids=["same", "same"])
    after_init_new(forward, object, SimpleNamespace(reqs=reqs), SimpleNamespace())
    assert forward.rids == ["same", "same"] and isinstance(forward.rids, BatchReaders)
    reqs.clear()  # the scheduler changes its batch while the forward runs
    assert [req.rid for req in readers_of(forward.rids)] == ["same", "same"]


def test_forwards_that_serve_nobody_and_a_hook_that_is_missing():
    forward = SimpleNamespace(rids=None)
    after_init_new(forward, object, SimpleNamespace(reqs=[]), SimpleNamespace())
    assert readers_of(forward.rids) is None
    with pytest.raises(InvariantError, match="does not know its requests"):
        readers_of(["r1"])
