"""Prompts longer than the pool, through SGLang's own admission (:class:`PrefillAdder`) with our hooks around it."""

from __future__ import annotations

from types import SimpleNamespace

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from helpers.harness import Harness
from sgl_kvevict.long_prompts import LongPrompts
from sgl_kvevict.sglang_adapter.long_prompts import (
    LongPromptAdmission,
    abort_stuck,
    admission_of,
    around_available,
    around_check,
    around_max_new_tokens,
    is_long,
    length_error,
)


class HookedBudget(PrefillBudget):
    """Room for chunks, with our hook."""

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        return around_available(PrefillBudget.available_chunk_tokens, self, chunk_limit)


class HookedAdder(PrefillAdder):
    """Admission, with our hook."""

    def _check_prefill_budget(self, req, **kwargs):
        return around_check(PrefillAdder._check_prefill_budget, self, req, **kwargs)


class LongPromptScheduler:
    """Queues, admits and prefills prompts on a harness, one round at a time.

    Attributes:
        queue: requests that wait, in order.
        chunked_req: the request whose chunks are being computed.
        aborted: requests that were stuck.
        found: tokens that a request found in the cache when it was admitted.
    """

    def __init__(self, harness: Harness, chunk: int) -> None:
        self.harness, self.chunk = harness, chunk
        self.tree_cache, self.token_to_kv_pool_allocator = harness.tree, harness.allocator
        plan = LongPrompts.of(harness.config, harness.num_slots, chunk)
        assert plan is not None
        self.plan = plan
        harness.allocator.kvevict_long_prompts = LongPromptAdmission(plan, harness.num_slots - 6, self)
        harness.allocator.create_prefill_budget = lambda tree, **kwargs: HookedBudget(harness.allocator, tree, **kwargs)
        self.queue: list[Req] = []
        self.chunked_req: Req | None = None
        self._pending_chunked_abort_req: Req | None = None
        self.aborted: list[Req] = []
        self.found: dict[Req, int] = {}

    def submit(self, req: Req) -> str | None:
        """Queue a request; return why it is refused, if it is."""
        allocator = self.token_to_kv_pool_allocator
        req.sampling_params.max_new_tokens = around_max_new_tokens(
            type(allocator).max_new_tokens_for_memory,
            allocator,
            len(req.origin_input_ids),
            req.sampling_params.max_new_tokens,
            token_capacity=self.harness.num_slots,
            sliding_window_size=None,
            chunk_size=self.chunk,
        )
        error = length_error(admission_of(allocator), self.tree_cache, req)
        if error is None:
            self.queue.append(req)
        return error

    def round(self) -> list[Req]:
        """Admit and prefill; return the requests that had a chunk, or all of their prompt, computed."""
        self._settle()
        running = [req for req in self.harness.live if req.output_ids]
        batch = SimpleNamespace(reqs=running, batch_size=lambda: len(running))
        adder = HookedAdder(1, self.tree_cache, self.token_to_kv_pool_allocator, batch, 0.5, 10_000, self.chunk)
        if self.chunked_req is not None:
            self.chunked_req.init_next_round_input()
            self.chunked_req = adder.add_chunked_req(self.chunked_req)
        for req in list(self.queue):
            if len(self.harness.live) == self.harness.num_rows or adder.rem_chunk_tokens <= 0:
                break
            req.init_next_round_input(self.tree_cache)
            adder.add_one_req(req, self.chunked_req is not None, None)
            if req not in adder.can_run_list:
                break
            self.queue.remove(req)
            self.found[req] = req.prefix_len
            self.harness.live.append(req)
        if adder.new_chunked_req is not None:
            assert self.chunked_req is None
            self.chunked_req = adder.new_chunked_req
        others = [req for req in self.harness.live if req.kv.holds_kv and req is not self.chunked_req]
        batch.is_empty = lambda: not others
        abort_stuck(SimpleNamespace(batch_to_run=adder.can_run_list or None, running_batch=batch), self)
        if self._pending_chunked_abort_req is not None:
            self.harness.abort(self._pending_chunked_abort_req)
            self.aborted.append(self._pending_chunked_abort_req)
            self.chunked_req = self._pending_chunked_abort_req = None
        # SGLang takes the next chunk of a prompt that fits by force; its scheduler admits nothing else meanwhile.
        is_crowded = any(req not in self.found for req in self.harness.live)
        for req in adder.can_run_list:
            must_fit = not is_crowded or is_long(self.tree_cache, req)
            assert self.harness.prefill(req, req.extend_end) or not must_fit, "admission promised the slots"
        return adder.can_run_list

    def _settle(self) -> None:
        """Forget a prompt that was released in the middle."""
        if self.chunked_req not in self.harness.live:
            self.chunked_req = None
