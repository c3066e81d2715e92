"""Scoring passes as requests of SGLang's scheduler."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_kvevict.lifecycle.nodes import key_of, namespace_of, path_to
from sgl_kvevict.lifecycle.ports import PassState
from sgl_kvevict.sglang_adapter.settings import published
from sgl_kvevict.sglang_adapter.tree import KVEvictTree

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from transformers import PreTrainedTokenizerBase

QUIET_TURNS = 500
"""Idle turns of a spinning scheduler: 0.14 s at the 3,500 turns per second measured on a busy CPU."""
TURNS_OF_MESSAGE = 50
"""Turns that an idle turn of a sleeping scheduler (``--sleep-on-idle``) stands for if a message ended it: the next
request may follow a question about the server's state at once. Without a message it took 1 s: ``QUIET_TURNS``."""

_NUMBERS = itertools.count(1)


class SchedulerPasses:
    """Implements :class:`sgl_kvevict.lifecycle.ports.PassPort`.

    A pass is an ordinary request, so admission, chunked prefill, aborts and overlap work as usual. It gets no answer
    and inserts nothing, so exactly its own slots are released.
    """

    def __init__(self, scheduler: Scheduler, *, has_messages: bool = False) -> None:
        self._scheduler = scheduler
        self._has_messages = has_messages

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
    def num_users(self) -> int:
        """Number of distinct waiting or running requests; only called while no pass waits or runs.

        Users of the last batch count once more when they have finished: with the overlap schedule the turn after
        their last step may process another one, and does not sleep. With data-parallel attention a rank without
        requests takes part in every step of the others: that is one user.
        """
        scheduler = self._scheduler
        batch = scheduler.last_batch
        last = set(batch.reqs) if batch else set()
        num_admitted = sum(
            not req.finished() or (req in last and not req.rid.startswith(scheduler.tree_cache.pass_name))
            for req in set(admitted(scheduler))
        )
        own = len(scheduler.waiting_queue) + num_admitted
        return own or int(batch is not None and batch.forward_mode.is_idle())

    @property
    def was_prefill(self) -> bool:
        """Whether the last batch was a prefill that delayed decoding requests."""
        last = self._scheduler.last_batch
        return last is not None and last.forward_mode.is_extend() and bool(self._scheduler.running_batch.reqs)

    @property
    def num_turns(self) -> int:
        """Turns of a spinning scheduler that the last idle one stands for.

        All ranks get the same messages. Read from the setting, because only the first rank has ``idle_sleeper``.
        """
        if not published("sleep_on_idle"):
            return 1
        return TURNS_OF_MESSAGE if self._has_messages else QUIET_TURNS

    @property
    def quiet_turns(self) -> int:
        """Turns without users before the server counts as idle; all ranks make the same number of turns."""
        return QUIET_TURNS

    @property
    def is_paused(self) -> bool:
        """Whether nothing may be started. Agreed between ranks: each ends its wait for a flush by its own clock."""
        is_flushing = self._scheduler.flush_wrapper._pending is not None
        return bool(self._scheduler._engine_paused) or self._scheduler.tree_cache.ranks.largest(is_flushing) > 0

    def start(self, node: UnifiedTreeNode, probe: Sequence[int]) -> Req:
        """Queue a complete request directly, bypassing the checks and limits for clients."""
        scheduler = self._scheduler
        sampling = SamplingParams(max_new_tokens=0, temperature=0)
        sampling.normalize(None)
        req = Req(
            f"{scheduler.tree_cache.pass_name}-{next(_NUMBERS)}",  # for logs only
            "",
            array("q", [*key_of(path_to(node)), *probe]),
            sampling,
            eos_token_ids=scheduler.model_config.hf_eos_token_id,
            vocab_size=scheduler.model_config.vocab_size,
            extra_key=node.key.extra_key,
            cache_salt=node.key.cache_salt,
        )
        req.lora_id = _loaded_adapter(scheduler, node)
        req.tokenizer = scheduler.tokenizer
        req.logprob_start_len = -1
        req.skip_radix_cache_insert = True
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


def after_ingest(received: Sequence[object], scheduler: Scheduler, *_args: object, **_kwargs: object) -> None:
    """Hook after SGLang took in new requests: runs once per turn of the loop, between two steps."""
    tree = scheduler.tree_cache
    if isinstance(tree, KVEvictTree):
        tree.clock.tick()
        result = tree.manager.between_steps(SchedulerPasses(scheduler, has_messages=bool(received)))
        if result is not None and tree.distilling is not None:
            tree.distilling.learned(result)
