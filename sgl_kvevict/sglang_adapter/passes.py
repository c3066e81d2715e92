"""Scoring passes as requests of SGLang's scheduler."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_kvevict.cache.nodes import key_of, namespace_of, path_to
from sgl_kvevict.cache.ports import PassState
from sgl_kvevict.sglang_adapter.tree import KVEvictTree

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from transformers import PreTrainedTokenizerBase

_NUMBERS = itertools.count(1)


class SchedulerPasses:
    """Implements :class:`sgl_kvevict.cache.ports.PassPort`.

    A pass is an ordinary request, so admission, chunked prefill, aborts and overlap work as usual. It gets no answer
    and inserts nothing, so exactly its own slots are released.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer; None on a server without one."""
        tokenizer: PreTrainedTokenizerBase | None = self._scheduler.tokenizer
        return tokenizer

    @property
    def room(self) -> int:
        """Exclusive upper bound on a pass's tokens."""
        return int(self._scheduler.max_req_input_len)

    @property
    def now(self) -> float:
        """Seconds of this process's monotonic clock."""
        return time.monotonic()

    @property
    def has_users(self) -> bool:
        """Whether a user's request waits, runs, or compiles its grammar.

        Users of the last batch count once more when they have finished: with the overlap schedule the turn after
        their last step may process another one, and does not sleep. With data-parallel attention a rank without
        requests takes part in every step of the others: it counts as having users.
        """
        scheduler = self._scheduler
        if self.has_waiting or any(map(self._is_users, scheduler.grammar_manager.grammar_queue)):
            return True
        batch = scheduler.last_batch
        if batch is not None and (batch.forward_mode.is_idle() or any(map(self._is_users, batch.reqs))):
            return True
        return any(self._is_users(req) and not req.finished() for req in admitted(scheduler))

    @property
    def has_waiting(self) -> bool:
        """Whether a user's request is in the queue."""
        return any(map(self._is_users, self._scheduler.waiting_queue))

    def _is_users(self, req: Req) -> bool:
        """Whether a request is neither a pass nor a probe of the server's health, of which some come every second."""
        return not req.rid.startswith((self._scheduler.tree_cache.pass_name, HEALTH_CHECK_RID_PREFIX))

    @property
    def is_paused(self) -> bool:
        """Whether nothing may be started; may differ between ranks: each ends its wait for a flush by its own clock."""
        return bool(self._scheduler._engine_paused) or self._scheduler.flush_wrapper._pending is not None

    def start(self, node: UnifiedTreeNode, probe: Sequence[int]) -> Req:
        """Queue a complete request directly, bypassing the checks and limits for clients."""
        tokens = [*key_of(path_to(node)), *probe]
        adapter = _loaded_adapter(self._scheduler, node)
        return self._queue(tokens, extra_key=node.key.extra_key, cache_salt=node.key.cache_salt, adapter=adapter)

    def prefill(self, tokens: Sequence[int]) -> Req:
        """Queue a text that the tree keeps; answered to no one, like a pass."""
        return self._queue(tokens, is_inserted=True)

    def _queue(
        self,
        tokens: Sequence[int],
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        is_inserted: bool = False,
    ) -> Req:
        scheduler = self._scheduler
        sampling = SamplingParams(max_new_tokens=0, temperature=0)
        sampling.normalize(None)
        req = Req(
            f"{scheduler.tree_cache.pass_name}-{next(_NUMBERS)}",  # for logs only
            "",
            array("q", tokens),
            sampling,
            eos_token_ids=scheduler.model_config.hf_eos_token_id,
            vocab_size=scheduler.model_config.vocab_size,
            extra_key=extra_key,
            cache_salt=cache_salt,
        )
        req.lora_id = adapter
        req.tokenizer = scheduler.tokenizer
        req.logprob_start_len = -1
        req.skip_radix_cache_insert = not is_inserted
        req.finished_output = True
        scheduler.init_req_max_new_tokens(req)
        scheduler._set_or_validate_priority(req)
        req.arrival_processed_tokens = scheduler.processed_tokens_counter
        req.time_stats.set_wait_queue_entry_time()
        scheduler.waiting_queue.append(req)
        return req

    def state(self, reader: Req) -> PassState:
        """State of a pass that has not ended."""
        if reader.kv.holds_kv:
            return PassState.RUNNING
        return PassState.WAITING if reader in self._scheduler.waiting_queue else PassState.GONE

    def withdraw(self, reader: Req) -> None:
        """Remove a waiting pass from the queue."""
        self._scheduler.waiting_queue.remove(reader)


def _loaded_adapter(scheduler: Scheduler, node: UnifiedTreeNode) -> str | None:
    """LoRA adapter of a prefix; None: the model alone, or it was unloaded, so no request finds the prefix any more."""
    adapter: str | None = scheduler.tree_cache.port.adapter_of(namespace_of(node))
    if adapter is None or adapter not in scheduler.tp_worker.model_runner.lora_manager.lora_refs:
        return None
    return adapter


def admitted(scheduler: Scheduler) -> list[Req]:
    """Requests running, in the last batch or in chunked prefill; may contain duplicates and finished ones."""
    found = [*scheduler.running_batch.reqs, *(scheduler.last_batch.reqs if scheduler.last_batch else ())]
    return found if scheduler.chunked_req is None else [*found, scheduler.chunked_req]


def after_ingest(_received: Sequence[object], scheduler: Scheduler, *_args: object, **_kwargs: object) -> None:
    """Hook after SGLang took in new requests: runs once per turn of the loop, between two steps."""
    tree = scheduler.tree_cache
    if isinstance(tree, KVEvictTree):
        tree.prefixes.between_steps(SchedulerPasses(scheduler))
