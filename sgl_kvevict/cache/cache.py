"""The objects that follow prefixes, made and connected: the tree, the scheduler and the attention call them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.cache.adoption import Adoption, Prompt
from sgl_kvevict.cache.complements import Complements
from sgl_kvevict.cache.core import Core
from sgl_kvevict.cache.growth import Growth
from sgl_kvevict.cache.host import HostMemory
from sgl_kvevict.cache.loading import Loading
from sgl_kvevict.cache.nodes import Node, Reader, path_to
from sgl_kvevict.cache.ports import TreePort
from sgl_kvevict.cache.prefills import Prefills
from sgl_kvevict.cache.pressure import Pressure
from sgl_kvevict.cache.readers import ReaderRecord, ReaderTable
from sgl_kvevict.cache.recency import MS, CostAwareRecency
from sgl_kvevict.cache.records import PrefixTable
from sgl_kvevict.cache.resize import Resizer
from sgl_kvevict.cache.saving import Saving, StoreAccess
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.store.host import HostSegments


class PrefixCache:
    """Prefixes, from the first prompt that holds them until they leave the tree.

    The adapter reports an event to the object that it concerns; events that concern several objects are the methods
    here. A feature that is off is an object that does nothing: policy ``none`` compresses nothing, and a host tier may
    have no memory.

    Attributes:
        saving: None without a store.
        loading: None if nothing is loaded from it.
        max_sharers: most requests that ever read one span in one forward.
        watchers: called between two steps; must be cheap. Their errors are held.
    """

    def __init__(
        self,
        tree: TreePort,
        compressor: Compressor,
        guard: Guard,
        clock: Callable[[], float],
        host: HostSegments,
        access: StoreAccess | None = None,
        state_slots: Callable[[Node], float | None] | None = None,
    ) -> None:
        self._tree, self._guard, self.compressor, self.access = tree, guard, compressor, access
        table = self.table = PrefixTable(shrinks=compressor.config.budget < 1)
        self.spans, self.totals = table.spans, table.totals
        self.readers = ReaderTable(tree)
        self.complements = Complements(compressor, guard, host)
        core = self.core = Core(tree, table, self.readers, compressor, guard, self.complements)
        self.recency = CostAwareRecency(table, clock, self._now, state_slots)
        resizer = self.resizer = Resizer(core)
        self.pressure = Pressure(core, resizer, self.recency)
        self.growth = Growth(core, resizer)
        self.prefills = Prefills(core, resizer)
        adoption = Adoption(core, resizer)
        self.host = HostMemory(core, adoption, host)
        self.recency.has_host_room = self.host.has_room_for
        self.saving: Saving | None = None
        self.loading: Loading | None = None
        if access is not None:
            self.saving = Saving(core, access)
            resizer.on_budget = self.saving.at_budget
            if access.reader is not None:
                self.loading = Loading(core, adoption, access, access.reader, self.host)
        self.max_sharers = 0
        self.watchers: list[Callable[[], None]] = []
        self._last_read: tuple[tuple[SpanRuns, ...], ...] = ()

    def _now(self) -> int:
        """Milliseconds, the same on all ranks, whose clocks differ: the largest reading of theirs."""
        return self._tree.largest(int(time.monotonic() * MS))

    # ---- events of requests -----------------------------------------------------------------------------------

    def released(self, reader: Reader) -> None:
        """A request was released: forget its state and compress ranges that waited for it."""
        record = self.readers[reader]
        record.observation, record.is_live, record.room = None, False, -1
        # The request is gone: an error here must not fail the step of others.
        with self._guard.at(Place.RELEASE):
            self.resizer.try_open()

    def aborted(self, path: Sequence[Node]) -> None:
        """A reader of a path was aborted: samples that were to come may not come, so no prompt of it waits for them."""
        with self._guard.at(Place.RELEASE):
            for node in self.table.stop_awaiting(path):
                self.resizer.compress(node)

    def admitting(self, reader: Reader, prompt: Prompt) -> None:
        """A request is about to match its prompt: load what the pool lacks of it.

        If it asked for a share of the entries, its segments grow. This is called again whenever SGLang tries to admit a
        request that waits; nothing is done unless more token slots are available than the last time, or the pool has
        dropped a prefix to the host meanwhile.
        """
        record = self.readers[reader]
        if record.is_exact:
            return
        room, num_left = self._tree.num_available, self.host.num_left
        # SGLang asks for each waiting request in each turn. Without either the answer is the same, and would cost a
        # look-up.
        if room <= record.room and num_left == record.num_left:
            return
        record.room = max(record.room, room)
        # First what comes back as it was: growth then starts from more, and needs fewer parts.
        self.host.load(reader, prompt)
        if record.least_share:
            tokens = prompt.tokens[: prompt.num_tokens + self._tree.lookahead]
            self.growth.to_share(self._tree.find(tokens, prompt.namespace), record.least_share)
        record.num_left = self.host.num_left  # what was dropped for this very prompt is no part of it

    def note_read(self, record: ReaderRecord, path: Sequence[Node], num_tokens: int) -> None:
        """Note for its client what a request reads of its prompt, the first ``num_tokens`` of a path."""
        if self.compressor.policy.compresses:
            record.has_read(self.spans.compressed_read(path, num_tokens))

    def between_steps(self) -> bool:
        """The scheduler is between two steps; return whether compression has released slots since the last time."""
        has_released = self.resizer.between_steps()
        if self.saving is not None:
            self.saving.between_steps()
        for watch in self.watchers:
            with self._guard.at(Place.MONITORING):
                watch()
        return has_released

    def reads(self, nodes: Sequence[Node]) -> tuple[tuple[SpanRuns, ...], ...]:
        """Return the spans that each request of a batch reads now, root first; ``nodes``: last node of each path.

        They are looked up anew for each forward, because other requests may have split nodes of the paths meanwhile.
        """
        paths = tuple(self.spans.runs(path_to(last)) for last in nodes)
        if paths != self._last_read:  # the attention keeps the paths until they change
            sharers = Counter(runs for path in paths for runs in path)
            self.max_sharers = max(self.max_sharers, *sharers.values(), 0)
            self._last_read = paths
        return paths

    # ---- events of nodes --------------------------------------------------------------------------------------

    def dropped(self, node: Node) -> Tensor | None:
        """Remove the record of a leaf that leaves the tree; return the token slots to release, [num_slots], int64.

        None: its ordinary ones, because it held no span.
        """
        span = self.table.drop(node)
        self.totals.dropped_nodes += 1
        if span is None:
            self.totals.dropped_slots += len(node.key)
            return None
        segment, slots = span.segment, span.segment.packed.token_slots
        self.totals.dropped_spans += 1
        if span.is_owner:
            self.totals.dropped_slots += slots.numel()
            return slots
        slots = self.resizer.repack(self.table.packed[segment], span.start) if segment.splittable else slots[:0]
        self.totals.repacks += slots.numel() > 0
        return slots

    def cleared(self) -> None:
        """The whole tree was flushed."""
        self.keep_only_spans()
        self.table.clear()
        self.pressure.clear()
        self.totals.clears += 1

    def keep_only_spans(self) -> None:
        """Forget everything but segments: the tree is empty, or the weights have changed."""
        # Prefills under way go on, but what they have observed is of old weights, or of tokens that have left the tree.
        for reader in self.readers:
            self.readers[reader].observation = None
        self.host.segments.clear()
        self.table.forget()

    # ---- the store ----------------------------------------------------------------------------------------------

    def switch_store_off(self) -> bool:
        """Stop saving and loading: the weights no longer match the store's identity. Returns whether it was on."""
        if self.access is None:
            return False
        was_on, self.access.is_on = self.access.is_on, False
        # Requests in the queue would wait for prefixes that are not wanted any more.
        if self.loading is not None:
            self.loading.clear()
        return was_on

    def close_store(self) -> None:
        """Take nothing new, and write what waits."""
        self.switch_store_off()
        if self.access is not None:
            self.access.close()

    def store_state(self) -> dict[str, Any]:
        """Counts of waiting and dropped work, for ``GET /server_info``; empty without a store."""
        if self.access is None:
            return {}
        num_skipped, num_waiting = (0, 0) if self.loading is None else self.loading.state()
        return {
            "is_on": self.access.is_on,
            "dropped": self.access.writer.num_dropped,
            "skipped": num_skipped,
            "waiting": self.access.writer.num_waiting + num_waiting,
        }
