"""Machines that also prefill prompts longer than the pool."""

from __future__ import annotations

from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from helpers.admission import LongPromptScheduler
from helpers.machines import BASES, PressureMachine, RetainMachine
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.sglang_adapter.long_prompts import is_long

CONFIG = KVEvictConfig(budget=0.3, tail_tokens=4, sink_tokens=2, min_prefix_tokens=12)
LONG_BASES = tuple([base[i % 48] for i in range(800)] for base in BASES)


class LongMachine(PressureMachine):
    """Prompts of up to 4.5 times the pool beside everything else, one of which is prefilled at a time."""

    options: ClassVar[dict[str, Any]] = {"waits": True, "config": CONFIG, "max_tokens": 1024}

    def __init__(self) -> None:
        super().__init__()
        self.admission = LongPromptScheduler(self.harness, chunk=20)

    @rule(
        base=st.sampled_from(LONG_BASES),
        shared=st.integers(0, 720),
        suffix=st.lists(st.integers(0, 10), min_size=1, max_size=30),
        extra_key=st.sampled_from([None, None, "tenant"]),
    )
    def submit_long(self, base, shared, suffix, extra_key):
        req = self.harness.request(base[:shared] + suffix, extra_key)
        refused = self.admission.submit(req)
        assert (refused is None) == (shared + len(suffix) <= self.admission.plan.longest())

    @precondition(lambda self: len(self.finished_texts) > 2 and self.admission.chunked_req is None)
    @rule()
    def change_weights(self):
        """Not between two chunks: what the prompt reads itself would keep its next chunk out of the cache."""
        super().change_weights()

    @precondition(lambda self: self.admission.queue or self.admission.chunked_req is not None)
    @rule(rounds=st.integers(1, 12))
    def prefill_long(self, rounds):
        for _ in range(rounds):
            tree = self.harness.tree
            must_run = not self.harness.live and any(is_long(tree, req) for req in self.admission.queue[:1])
            done = self.admission.round()
            assert done or not must_run, "a prompt longer than the pool is admitted by an idle pool"
            assert not self.admission.aborted, "alone, what is admitted has room for its next chunk"
            self.decoding += [req for req in done if req.output_ids and req in self.harness.live]
            self._settle()

    @precondition(lambda self: self.admission.chunked_req in self.harness.live)
    @rule(comes_again=st.booleans())
    def stop_long(self, comes_again):
        req = self.admission.chunked_req
        if comes_again:
            self.harness.retract(req)
            self.admission.queue.append(req)
        else:
            self.harness.abort(req)


class RetainLongMachine(RetainMachine, LongMachine):
    """What others want to stay keeps no prompt from the pool; what a chunk has lost comes back."""

    num_slots = LongMachine.num_slots
    options: ClassVar[dict[str, Any]] = RetainMachine.options | LongMachine.options


LONG_MACHINES = (LongMachine, RetainLongMachine)
