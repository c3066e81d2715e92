"""Machines that do everything a scheduler does in random order, for hypothesis.

The harness verifies contents at every forward and conservation after every operation; a machine only has to reach
interesting states: prompts that share prefixes of all lengths, a pool small enough to force drops and retractions,
deep chains of turns, ranges that wait for other readers, spans that can be cut and, with sliding windows, that cannot.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, cast

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.managers.schedule_batch import Req

from helpers.decisions import OWN_POLICIES
from helpers.harness import CONFIG, Harness, PseudoRandomPolicy
from helpers.harness_store import adoption, exported
from helpers.late_stream import TwiceStream
from helpers.pseudo_random_policy import KeepsEach
from sgl_kvevict.cache.nodes import length_of, path_to
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.guard import Place
from sgl_kvevict.policies import Policy, build_policy
from sgl_kvevict.policies.signals import Signal

BASES = ([i * 7 % 11 for i in range(48)], [i * 5 % 7 for i in range(48)])
AGAIN: Any = {
    "base": st.sampled_from(BASES),
    "known": st.integers(20, 48),
    "shared": st.integers(6, 48),
    "suffix": st.lists(st.integers(0, 10), min_size=1, max_size=14),
    "count": st.sampled_from([20, 60, 200]),
}
"""A text of which so much is known, a question that shares so much of it, and slots that are wanted between both."""


class CacheMachine(RuleBasedStateMachine):
    """Drives one cache; subclasses choose the policy."""

    policy: PseudoRandomPolicy | Policy | None = PseudoRandomPolicy()
    num_slots = 130
    options: ClassVar[dict[str, Any]] = {}
    num_operations = 0

    make_harness: ClassVar[type[Harness]] = Harness

    def __init__(self) -> None:
        super().__init__()
        config = self.options.get("config", CONFIG).model_copy(update={"answer_block": 6})
        options = self.options | {"config": config}
        self.harness = self.make_harness(num_slots=self.num_slots, num_rows=6, policy=self.policy, **options)
        self.harness.tree.prefixes.resizer.num_joined = 3
        self.prefilling: list[Req] = []
        self.decoding: list[Req] = []
        self.finished_texts: list[tuple[list[int], str | None]] = []

    def _settle(self) -> None:
        """Forget requests that the harness released on its own (slots were short, or they finished at prefill)."""
        self.prefilling = [req for req in self.prefilling if req in self.harness.live]
        self.decoding = [req for req in self.decoding if req in self.harness.live]

    @rule(
        base=st.sampled_from(BASES),
        shared=st.integers(0, 48),
        suffix=st.lists(st.integers(0, 10), min_size=1, max_size=14),
        extra_key=st.sampled_from([None, None, None, "tenant"]),
        max_new_tokens=st.sampled_from([1, 8, 8]),
        first_chunk=st.sampled_from([0, 5, 20, 200, 200, 200]),
        rid=st.sampled_from(["same", "other"]),
        is_cached=st.sampled_from([True, True, True, False]),
    )
    def submit(self, base, shared, suffix, extra_key, max_new_tokens, first_chunk, rid, is_cached):
        req = self.harness.request(base[:shared] + suffix, extra_key)
        req.skip_radix_cache_insert = not is_cached
        req.rid = rid  # clients choose names, also ones that are in use
        req.sampling_params.max_new_tokens = max_new_tokens
        self._admit(req, first_chunk)

    def _admit(self, req, first_chunk):
        if self.harness.admit(req):
            self.prefilling.append(req)
            if first_chunk:
                self._prefill(req, first_chunk)

    def _prefill(self, req, chunk):
        if self.harness.prefill(req, req.prefix_len + chunk) and req.output_ids and req in self.harness.live:
            self.prefilling.remove(req)
            self.decoding.append(req)
        self._settle()

    @precondition(lambda self: self.finished_texts)
    @rule(data=st.data(), message=st.lists(st.integers(0, 10), min_size=1, max_size=9))
    def next_turn(self, data, message):
        tokens, extra_key = data.draw(st.sampled_from(self.finished_texts))
        if len(tokens) <= 90:
            self._admit(self.harness.request(tokens + message, extra_key), 200)

    @precondition(lambda self: self.prefilling)
    @rule(data=st.data(), chunk=st.integers(1, 40))
    def prefill(self, data, chunk):
        self._prefill(data.draw(st.sampled_from(self.prefilling)), chunk)

    @precondition(lambda self: self.decoding)
    @rule(steps=st.integers(1, 5))
    def decode(self, steps):
        for _ in range(steps):
            for req in list(self.decoding):
                self.harness.decode(req)
                self._settle()

    @precondition(lambda self: self.decoding)
    @rule(data=st.data(), steps=st.integers(5, 20))
    def answer(self, data, steps):
        """An answer grows between turns of the loop, and is compressed meanwhile."""
        self._answer(data.draw(st.sampled_from(self.decoding)), steps)
        self._settle()

    def _answer(self, req, steps):
        while steps and req in self.harness.live:
            self.harness.decode(req)
            self.harness.turn()
            steps -= 1

    @precondition(lambda self: self.decoding)
    @rule(data=st.data(), ahead=st.integers(0, 12), steps=st.integers(0, 24))
    def follow(self, data, ahead, steps):
        """Another request gives the answer of one that runs, and ends somewhere in it, or after it."""
        req = data.draw(st.sampled_from(self.decoding))
        # All is checked at the end: so many steps would take most of the time.
        vars(self.harness)["check"] = lambda: None
        self._answer(req, ahead)
        other = self.harness.run(list(req.origin_input_ids), req.extra_key)
        if other in self.harness.live:
            self._answer(other, steps)
        if other in self.harness.live:
            self.harness.finish(other)
        del vars(self.harness)["check"]
        self._settle()

    @precondition(lambda self: self.decoding)
    @rule(data=st.data())
    def finish(self, data):
        req = data.draw(st.sampled_from(self.decoding))
        self.finished_texts.append((list(req.origin_input_ids) + list(req.output_ids), req.extra_key))
        self.harness.finish(req)
        self._settle()

    @precondition(lambda self: self.decoding or any(req.kv.holds_kv for req in self.prefilling))
    @rule(data=st.data(), resubmit=st.booleans())
    def retract(self, data, resubmit):
        holding = self.decoding + [req for req in self.prefilling if req.kv.holds_kv]
        req = data.draw(st.sampled_from(holding))
        self.harness.retract(req)
        self._settle()
        if resubmit:
            self._admit(req, 200)

    @rule(count=st.integers(1, 60))
    def evict(self, count):
        self.harness.evict(count)

    @precondition(lambda self: len(self.finished_texts) > 2)
    @rule()
    def change_weights(self):
        tree = self.harness.tree
        tree.forget_compressed()
        assert all(tree.port.num_locks(node) and tree._blocking.is_retired(node) for node in tree.spans)

    @precondition(lambda self: not self.harness.live and len(self.finished_texts) > 3)
    @rule()
    def flush(self):
        self.harness.flush()
        self.finished_texts.clear()

    @invariant()
    def conserved(self):
        CacheMachine.num_operations += 1
        self.harness.check()
        assert not any(self.harness.tree.guard.errors.values())

    def teardown(self):
        for req in list(self.harness.live):
            if req.kv.holds_kv:
                self.harness.retract(req)
            else:
                self.harness._cancel(req)
        assert self.harness.tree.protected_size() == 0
        self.harness.evict(self.harness.num_slots)
        assert self.harness.tree.slot_allocator.available_size() == self.harness.num_slots


class PressureMachine(CacheMachine):
    """Most prompts stay uncompressed until slots are short: prefixes shrink under their readers."""

    num_slots = 160
    options: ClassVar[dict[str, Any]] = {"waits": True}

    def _admit(self, req, first_chunk):
        if sum(req.origin_input_ids) % 3 == 1:
            req.sampling_params.custom_params = None  # compressed when its prompt is complete
        super()._admit(req, first_chunk)

    @rule()
    def turn(self):
        self.harness.turn()


class WhenShortMachine(PressureMachine):
    """All of them do; a few can be ranked by what their prompts have left, and what is more is compressed before."""

    policy = PseudoRandomPolicy(needs=frozenset({Signal.WINDOW_QUERIES}), window_size=4)
    config = KVEvictConfig(budget=0.3, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6, compress="when short")
    options: ClassVar[dict[str, Any]] = {"config": config}

    def __init__(self) -> None:
        super().__init__()
        self.harness.tree.prefixes.resizer.observation_bytes = 2_000


class MergingMachine(PressureMachine):
    """Entries are merged into others when a range is compressed."""

    policy = PseudoRandomPolicy(merger=KeepsEach())


class WindowsMachine(CacheMachine):
    """A layer with a sliding window keeps the end of a range, which is found whole or not at all."""

    options: ClassVar[dict[str, Any]] = {"windows": (5, 0)}


class ExactMachine(PressureMachine):
    """Some requests read nothing compressed, and hold what they read."""

    def _admit(self, req, first_chunk):
        if sum(req.origin_input_ids) % 3 == 0:
            self.harness.tree.prefixes.readers[req].is_exact = True
        super()._admit(req, first_chunk)


class HostMachine(PressureMachine):
    """What is dropped or evicted moves to the host's memory, which is short too, and comes back."""

    options: ClassVar[dict[str, Any]] = {"waits": True, "host_blocks": 16}

    def _admit(self, req, first_chunk):
        """Some requests ask for entries that were evicted."""
        record = self.harness.tree.prefixes.readers[req]
        record.least_share = [0.0, 0.0, 0.5, 1.0][sum(req.origin_input_ids) // 3 % 4]
        super()._admit(req, first_chunk)

    @rule(number=st.integers(0, 20))
    def grow(self, number):
        """A segment takes back what it lost last, with or without free slots."""
        prefixes = self.harness.tree.prefixes
        growing = [each for each in prefixes.table.packed if prefixes.growth.next_of(each) is not None]
        if growing:
            prefixes.growth.grow(growing[number % len(growing)])
        self._settle()

    @rule(name=st.sampled_from(["put_evicted", "get_evicted", "_gathered", "_placed"]))
    def break_host(self, name):
        """The next copy to or from the host fails: the prefix loses these entries, and nothing else happens."""
        guard, prefixes = self.harness.tree.guard, self.harness.tree.prefixes
        broken = prefixes.compressor.packer if name == "_placed" else self.harness.host

        def fail(*args):
            delattr(broken, name)
            guard.errors[Place.HOST] -= 1
            raise MemoryError

        setattr(broken, name, fail)

    @rule(number=st.integers(0, 20), count=st.sampled_from([0, 20, 200]))
    def comes_from_a_file(self, number, count):
        """A segment is written to a file with what was evicted from it, may be dropped, and is read again."""
        if "get_evicted" in vars(self.harness.host):
            return  # the next copy fails: it would not be written
        records = exported(self.harness, is_complete=True)
        if records:
            self.harness.evict(count)
            adoption(self.harness).adopt(records[number % len(records)], (None, None))
        self._settle()

    @rule(**AGAIN)
    def comes_back(self, base, known, shared, suffix, count):
        """Somebody asks about a text again after the pool has dropped some, or all that it can."""
        req = self.harness.run(base[:known] + suffix[:1])
        if req in self.harness.live:
            self.harness.finish(req)
        self.harness.evict(count)
        self._admit(self.harness.request(base[:shared] + suffix), 200)
        self._settle()


class GrowthMachine(HostMachine):
    """The host has room for most of what is evicted, and the pool is ample from time to time."""

    num_slots = 260
    options: ClassVar[dict[str, Any]] = {"waits": True, "host_blocks": 120}

    @rule(base=st.sampled_from(BASES), shared=st.integers(20, 48), steps=st.integers(1, 6))
    def shrink(self, base, shared, steps):
        """A text is read, shrinks step by step under its readers, and is read again."""
        prefixes = self.harness.tree.prefixes
        for suffix in ([0], [1]):
            req = self.harness.run(base[:shared] + suffix)
            if req in self.harness.live:
                self.harness.finish(req)
            for _ in range(steps):
                for node in sorted(prefixes.table.shrinking, key=lambda node: node.id)[:1]:
                    prefixes.pressure._shrink(node, set(prefixes.readers.movable_nodes()))
        self.harness.check()
        self._settle()


class Retaining(CacheMachine):
    """Requests want their prefix to stay."""

    def __init__(self):
        super().__init__()
        self.milliseconds = 0
        self.credits = {}
        self.harness.tree.prefixes.recency._read_now = lambda: self.milliseconds

    def _admit(self, req, first_chunk):
        number, options = sum(req.origin_input_ids), dict((req.sampling_params.custom_params or {}).get("kvevict", {}))
        if seconds := [None, 0.2, 9][number // 4 % 3]:
            options["retain"] = seconds
        elif number % 5 == 0:
            self.harness.tree.prefixes.readers[req].is_exact = True
        req.sampling_params.custom_params = {"kvevict": options}
        super()._admit(req, first_chunk)

    @rule(number=st.integers(0, 2**20))
    def time_passes(self, number):
        self.milliseconds += number % 8 * 125

    @invariant()
    def counts_as_used(self):
        """What is retained has the credit of what is used now, and keeps that when its time has come."""
        prefixes, credits = self.harness.tree.prefixes, {}
        for node in self.harness.tree.nodes():
            credit = credits[node] = prefixes.recency.priority(node, 0.0)
            assert credit >= self.credits.get(node, credit)
            if prefixes.table.retained.get(node, 0) > self.milliseconds:
                assert credit == (prefixes.recency._levels[-1], math.inf)
        self.credits = credits


class RetainMachine(Retaining, GrowthMachine):
    """What counts as used leaves for the host's memory all the same, comes back, shrinks and grows again."""


class SessionMachine(CacheMachine):
    """Requests belong to sessions, whose prefixes go last (`--enable-session-radix-cache`)."""

    options: ClassVar[dict[str, Any]] = {"has_sessions": True}

    def _admit(self, req, first_chunk):
        session = ["", "first", "second", "third"][sum(req.origin_input_ids) % 4]
        if session:
            req.session_id = session
            req.session_generation = self.harness.tree.ensure_session_generation(session)
        super()._admit(req, first_chunk)

    @rule(session=st.sampled_from(["first", "second", "third"]))
    def close_session(self, session):
        self.harness.tree.release_radix_session(session)

    @rule(session=st.sampled_from(["first", "second", "third"]))
    def open_session(self, session):
        self.harness.tree.open_radix_session(session)


class BesideMachine(CacheMachine):
    """Entries are chosen beside steps, by keys that must not change meanwhile, and exchanged two turns later."""

    policy: PseudoRandomPolicy | Policy | None = build_policy(OWN_POLICIES["knorm"], {})
    num_slots = 220
    options: ClassVar[dict[str, Any]] = {"make_stream": TwiceStream}

    def _admit(self, req, first_chunk):
        if sum(req.origin_input_ids) % 7 == 0:
            self.harness.tree.prefixes.readers[req].is_exact = True
        super()._admit(req, first_chunk)

    @rule(count=st.integers(1, 3))
    def turn(self, count):
        for _ in range(count):
            self.harness.turn()

    @rule(at=st.integers(6, 40))
    def compress_beginning(self, at):
        """The first tokens of a range whose entries are being chosen are to be compressed, too."""
        prefixes = self.harness.tree.prefixes
        for last in list(prefixes.table.open):
            path = path_to(last)
            end = prefixes.spans.compressed_len(path) + at
            if last in prefixes.table.open and end < length_of(path):
                prefixes.resizer.compress(last, end, share=1.0)
        self.harness.check()

    @rule()
    def catch_up(self):
        stream = self.harness.tree.compressor.stream
        cast("TwiceStream", stream).catch_up()

    def teardown(self):
        self.catch_up()
        super().teardown()


class BesideHostMachine(BesideMachine):
    """What is dropped meanwhile moves to the host's memory."""

    num_slots = 130
    options: ClassVar[dict[str, Any]] = BesideMachine.options | {"scores_any_range": True, "host_blocks": 16}


class BesideRetainMachine(BesideMachine, RetainMachine):
    """What has shrunk meanwhile grows again; of what stays entries are still being chosen."""

    policy = RetainMachine.policy
    options: ClassVar[dict[str, Any]] = RetainMachine.options | BesideMachine.options


class BesidePressureMachine(BesideMachine, PressureMachine):
    """What waits until slots are short is being chosen, and parts of it have to shrink meanwhile."""

    policy = PressureMachine.policy
    options: ClassVar[dict[str, Any]] = PressureMachine.options | BesideMachine.options


class StockMachine(CacheMachine):
    """Policy ``none``: the same accounting without any compression."""

    policy = None


def varied(name: str, *bases: type[CacheMachine], **options: Any) -> type[CacheMachine]:
    """A machine that only joins others, whose harness has more options here."""
    joined = {key: value for base in reversed(bases) for key, value in base.options.items()}
    return type(name, bases, {"options": joined | options})


HostExactMachine = varied("HostExactMachine", ExactMachine, HostMachine)
CoarsePressureMachine = varied("CoarsePressureMachine", PressureMachine, cache_grid=7)
"""Some lengths only are cached, as for models with a recurrent state: checkpoints stop short of prompts."""
FrequencyPressureMachine = varied("FrequencyPressureMachine", PressureMachine, eviction_policy="lfu")
TAIL = {"threshold": 20, "next_prompt_estimate": 5}
TailMachine = varied("TailMachine", CacheMachine, eviction_policy="tlru", eviction_config=TAIL)
"""T-LRU decides which leaf goes (`--radix-eviction-policy tlru`)."""
ON_OTHER_POOLS = (PressureMachine, ExactMachine, SessionMachine, StockMachine)
"""Machines that also run on the pools of models with recurrent or sliding-window layers."""

SETTINGS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

MACHINES = (
    *(CacheMachine, PressureMachine, WhenShortMachine, HostMachine, GrowthMachine, HostExactMachine, MergingMachine),
    varied("WindowsHostMachine", HostMachine, windows=(5, 0)),  # what comes back is whole
    RetainMachine,
    varied("RetainAloneMachine", Retaining, PressureMachine),
    WindowsMachine,
    varied("WindowsUnderPressureMachine", PressureMachine, windows=(0, 9)),
    *(ExactMachine, CoarsePressureMachine, FrequencyPressureMachine),
    varied("CoarseMachine", CacheMachine, cache_grid=7),
    *(TailMachine, SessionMachine, BesideMachine),
    varied("BesideWindowsMachine", BesideMachine, windows=(5, 0)),
    *(BesideHostMachine, BesideRetainMachine, BesidePressureMachine, StockMachine),
)
LATENT_MACHINES = (
    varied("LatentsMachine", PressureMachine, is_latent=True),
    varied("LatentsHostMachine", HostMachine, is_latent=True),
)
"""Values are a part of the keys' rows, so one row moves for both."""
