"""What a harness's server would store under, and how its segments leave and come back."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

from helpers.harness import Harness
from helpers.stored import drained
from helpers.stored import identity as identity_of
from sgl_kvevict.cache.adoption import Adoption, Prompt
from sgl_kvevict.cache.export import export_segment
from sgl_kvevict.cache.saving import StoreAccess
from sgl_kvevict.sglang_adapter.scheduler_store import fetch
from sgl_kvevict.store.identity import StoreIdentity
from sgl_kvevict.store.reader import ReadAhead
from sgl_kvevict.store.segment_file import SegmentRecord, decode_segment, encode_segment
from sgl_kvevict.store.segments import SegmentStore, open_backend
from sgl_kvevict.store.writer import WriteBehind

DRAFT = identity_of(num_layers=1, num_kv_heads=3, head_dim=2, own_value_dim=2)
"""The draft model of :class:`helpers.verify_machines.VerifyingHarness`."""
NUMBERS = itertools.count()
"""Of stores in memory."""
IDENTITY = identity_of(head_dim=2, own_value_dim=2, policy="pseudo-random", min_prefix_tokens=6)


def identity_for(harness: Harness) -> StoreIdentity:
    """The same of a harness that has its own number of heads, width of rows and dtype."""
    geometry, config = harness.geometry, harness.tree.prefixes.core.compressor.config
    return dataclasses.replace(
        IDENTITY,
        dtype=str(harness.k.dtype),
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        own_value_dim=geometry.own_value_dim,
        sink_tokens=config.sink_tokens,
        statistics="" if config.bits == 16 else "ef" * 32,
    )


def exported(harness: Harness, *, is_complete: bool = False) -> list[SegmentRecord]:
    """Segments of the plain namespace of a harness, through bytes and back, those nearest the root first.

    ``is_complete``: with what was evicted from them.
    """
    tree, identity, records = harness.tree, identity_for(harness), []
    for node, span in tree.spans.items():
        if span.end != span.segment.end or node.key.extra_key is not None:
            continue
        complements = tree.prefixes.complements if is_complete else None
        if (record := export_segment(node, tree.spans, tree.packer, identity, complements)) is not None:
            records.append(decode_segment(encode_segment(record, DRAFT.digest), record.key, identity, DRAFT))
    return sorted(records, key=lambda record: record.start)


def adoption(harness: Harness) -> Adoption:
    """What brings segments into a harness's tree."""
    return Adoption(harness.tree.prefixes.core, harness.tree.prefixes.resizer)


def found_again(
    records: list[SegmentRecord], prompt: Prompt, into: Adoption, draft: StoreIdentity | None, identity: StoreIdentity
) -> Iterator[SegmentRecord]:
    """Write segments to a store, and yield those that a server with a draft model finds there for a prompt."""
    items = open_backend(f"memory://machine/{next(NUMBERS)}")
    for record in records:
        SegmentStore(items, identity, draft=DRAFT).put(record, identity.namespace(*prompt.namespace))
    store = SegmentStore(items, identity, draft=draft)
    lookup = into.lookup(prompt, identity)
    return store.continuing(lookup, store.find(lookup.tokens, lookup.namespace), store.get)


class Server:
    """A harness, of class ``make``, with a store; ``now`` is its clock."""

    def __init__(self, folder, identity=IDENTITY, draft=None, make=Harness, **kind):
        self.now = 0.0
        self.segments = SegmentStore(open_backend(str(folder)), identity, draft=draft)
        self.writer = WriteBehind(self.segments)
        self.reader = ReadAhead(self.segments, 1.0, lambda: self.now)
        self.access = StoreAccess(self.segments, self.writer, self.reader)
        self.harness = make(access=self.access, **kind)
        self.prefixes = self.harness.tree.prefixes
        assert self.prefixes.loading is not None and self.prefixes.saving is not None
        self.loading, self.saving = self.prefixes.loading, self.prefixes.saving

    @property
    def loaded(self) -> tuple[int, int]:
        """Segments that came from the store so far, and their tokens."""
        return self.prefixes.totals.loaded_segments, self.prefixes.totals.loaded_tokens

    def queue(self, prompt, extra_key=None):
        """A request that is queued, of which ``prompt`` can be found."""
        req = self.harness.request([*prompt, 9], extra_key)
        self.loading.queued(req, Prompt(req.origin_input_ids, len(prompt), (extra_key, None)))
        return req

    def begin(self, *queue):
        """Requests that wait while no fetch has ended: the threads that fetch are held."""
        gate, find = threading.Event(), self.segments.find

        def wait_and_find(tokens, namespace):
            assert gate.wait(300)
            return find(tokens, namespace)

        with mock.patch.object(self.segments, "find", wait_and_find):
            still = self.loading.settle(queue)
        gate.set()
        return still

    def settle(self, *queue):
        """Settle once all begun fetches are done; return the requests that still wait."""
        self.loading.settle(queue)
        assert drained(self.reader._workers)
        return self.loading.settle(queue)

    def serve(self, prompt, *, extra_key=None, lora_id=None, share=0.0):
        """Queue a request, which may ask for a share of the entries, wait for the store, and run it.

        Returns how much it found.
        """
        req = self.harness.request(prompt, extra_key, lora_id=lora_id)
        self.prefixes.readers[req].least_share = share
        fetch(SimpleNamespace(tree_cache=self.harness.tree), req)
        assert self.settle(req) == set()
        self.harness.check()
        assert self.harness.admit(req)
        found = req.prefix_len
        assert self.harness.prefill(req)
        self.harness.decode(req)
        self.harness.finish(req)
        assert drained(self.writer)
        self.saving.between_steps()
        return found
