"""Admits prompts that are longer than the pool, whose chunks shrink meanwhile, and answers that shrink."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.common import evict_from_tree_cache

from sgl_kvevict.cache.nodes import path_to
from sgl_kvevict.errors import shown
from sgl_kvevict.long_prompts import LongPrompts
from sgl_kvevict.sglang_adapter.settings import published
from sgl_kvevict.sglang_adapter.tree import KVEvictTree

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.prefill_budget import PrefillBudget

logger = logging.getLogger(__name__)

STUCK = "The prompt is longer than the KV pool, and what was computed of it cannot be compressed any further."


@dataclass
class LongPromptAdmission:
    """State of one scheduler; SGLang's allocator carries it, because some hooks see nothing else.

    Attributes:
        limit: prompts with at least so many tokens are long (SGLang's own limit).
        is_parked: in this turn there was no room for the next chunk of the long prompt that is being prefilled.
    """

    plan: LongPrompts
    limit: int
    scheduler: Scheduler
    is_parked: bool = False

    @property
    def prefilling(self) -> Req | None:
        """The long prompt whose chunks are being computed; others are admitted after its last chunk.

        Not kept between two turns: a pause that retracts, an abort or a flush ends the prefill meanwhile.
        """
        req = self.scheduler.chunked_req
        return req if is_long(self.scheduler.tree_cache, req) else None


def admission_of(allocator: BaseTokenToKVPoolAllocator) -> LongPromptAdmission | None:
    """The state that an allocator carries; None: no prompt may be longer than the pool."""
    return getattr(allocator, "kvevict_long_prompts", None)


def lift_limits(scheduler: Scheduler) -> None:
    """Lift a scheduler's limits on the length of prompts.

    They stay with ``--allow-auto-truncate``, with speculative decoding, and for models with windows or several pools.
    """
    tree = scheduler.tree_cache
    if not isinstance(tree, KVEvictTree) or published("allow_auto_truncate"):
        return
    if tree.is_swa_enabled or tree.supports_mamba() or not tree.compressor.splittable:
        return
    if not scheduler.spec_algorithm.is_none():
        return
    num_slots, chunk = tree.slot_allocator.size, scheduler.chunked_prefill_size
    plan = LongPrompts.of(tree.compressor.config, num_slots, chunk)
    if plan is None or scheduler.model_config.context_len <= num_slots:
        return
    scheduler.token_to_kv_pool_allocator.kvevict_long_prompts = LongPromptAdmission(
        plan, scheduler.max_req_input_len, scheduler
    )
    scheduler.max_req_len = scheduler.model_config.context_len - 1
    scheduler.max_req_input_len = scheduler.max_req_len - 5  # as SGLang does
    if tree.ranks.is_first:
        longest = min(plan.longest(), scheduler.max_req_input_len - 1)
        logger.info("kvevict: prompts of up to %d tokens are served by %d token slots", longest, num_slots)
        if plan.chunk < chunk:
            logger.warning(
                "kvevict: --chunked-prefill-size is %d, too large for prompts longer than the pool: their chunks have "
                "at most %d tokens",
                chunk,
                plan.chunk,
            )


def around_max_new_tokens(
    original: Callable[..., int | None],
    allocator: BaseTokenToKVPoolAllocator,
    input_tokens: int,
    max_new_tokens: int,
    **kwargs: Any,
) -> int | None:
    """Hook around the bound that the pool sets on an answer: a long prompt counts with what it holds at its peak."""
    admission = admission_of(allocator)
    if admission is not None and input_tokens >= admission.limit:
        input_tokens = admission.plan.slots_at_peak(input_tokens)
    return original(allocator, input_tokens, max_new_tokens, **kwargs)


def length_error(admission: LongPromptAdmission | None, tree: KVEvictTree, req: Req) -> str | None:
    """Return why a prompt longer than the pool cannot be served; None if it can, or if it fits."""
    num_tokens = len(req.origin_input_ids)
    if admission is None or num_tokens < admission.limit:
        return None
    plan, most = admission.plan, admission.limit - 1
    got = f"input_ids: got {num_tokens} tokens, more than the pool's {plan.num_slots} token slots"
    if req.skip_radix_cache_insert:
        has_overrides = req.positional_embed_overrides is not None
        field = "positional_embed_overrides" if has_overrides else f"bootstrap_host {shown(req.bootstrap_host)}"
        return f"{got}, with {field}; allowed: at most {most}, because nothing of it is cached, or shrinks"
    if tree.prefixes.readers.is_exact(req):
        return f"{got}, with exact; allowed: at most {most}, because an exact request reads nothing compressed"
    if num_tokens > plan.longest():
        share = plan.affordable_share(num_tokens, 1)
        would_do = f"min_budget {share} would do" if share else "no min_budget would do"
        return (
            f"{got}; allowed: at most {plan.longest()}, because at min_budget {plan.config.shares[-1]} it would hold "
            f"{plan.slots_at_peak(num_tokens)} of them while it is prefilled ({would_do})"
        )
    num_new = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
    room = max(plan.num_slots - 2 - num_new - plan.slots_at_peak(num_tokens), 0)
    if _num_with_logprobs(req) > room:
        return (
            f"{got}, with logprob_start_len {shown(req.logprob_start_len)}; allowed: at least {num_tokens - room}, "
            "because tokens with log-probabilities are not compressed while the prompt is prefilled"
        )
    affordable = plan.affordable_share(num_tokens, num_new)
    tree.prefixes.readers[req].chunk_share = max(min(plan.config.budget, affordable), plan.config.shares[-1])
    return None


def around_check(
    original: Callable[..., tuple[bool, int | None]],
    adder: PrefillAdder,
    req: Req,
    *,
    extend_input_len: int,
    total_tokens: int,
    **kwargs: Any,
) -> tuple[bool, int | None]:
    """Hook around the check whether a request fits: a long prompt counts with what it holds at its peak.

    Answers count with what they hold once they are compressed. While a long prompt is prefilled no other request is
    admitted, as beside a prompt of SGLang's that fills every chunk. If a request does not fit although nothing runs,
    the part of its segment behind its own prefix is released.
    """
    tree, admission = adder.tree_cache, admission_of(adder.token_to_kv_pool_allocator)
    if admission is not None:
        # A long prompt may have begun in this very turn, when the scheduler does not know of it yet.
        busy = adder.new_chunked_req if is_long(tree, adder.new_chunked_req) else admission.prefilling
        # Others may join its last chunk: no further one needs the room.
        if busy not in (None, req) and busy.extend_end < len(busy.full_untruncated_fill_ids):
            return False, None
    limit = kwargs.get("chunk_limit", adder.rem_chunk_tokens)
    num_new = total_tokens - extend_input_len
    saved = _saved_of_answers(adder, req, num_new)
    kwargs |= {"extend_input_len": extend_input_len, "total_tokens": total_tokens - saved}
    check = partial(original, adder, req, **kwargs)
    verdict = check()
    # While anything runs its end may release enough.
    is_alone = not adder.can_run_list and not adder.running_batch.reqs
    # Its lock counts the whole segment as taken, so without this the request would wait for ever.
    if not verdict[0] and is_alone and isinstance(tree, KVEvictTree) and tree.drop_unread_parts(req):
        verdict = check()
    if verdict[0] and (limit is None or extend_input_len <= limit):
        # SGLang reserves the whole answer next, but that of a prompt whose last chunk is still to come.
        adder.memory_budget.total_offset -= saved
    if verdict[0] or admission is None or limit is None or not is_long(tree, req):
        return verdict
    # SGLang has locked the prefix for this check, so its slots count as taken; the peak counts the whole prompt.
    prefix = path_to(tree.tree_core.node_by_id(req.last_node))
    # What an exact request reads cannot shrink, so it does not count as room.
    held = 0 if tree.prefixes.readers.has_exact(prefix) else sum(map(tree.node_slots, prefix))
    peak = admission.plan.slots_at_peak(len(req.full_untruncated_fill_ids)) + num_new + _num_with_logprobs(req)
    if peak >= adder.rem_total_tokens + held:
        return verdict
    return True, min(limit, admission.plan.chunk)


def _saved_of_answers(adder: PrefillAdder, req: Req, num_new: int) -> int:
    """Token slots of a request's next ``num_new`` tokens that others can have before it ends.

    At the first check of a pass, what running requests are expected to take is lowered in the same way. If all answers
    are as long as they may be, and slots are short nevertheless, SGLang retracts one, as it does with its own estimate.
    """
    tree = adder.tree_cache
    if not isinstance(tree, KVEvictTree):
        return 0
    if not hasattr(adder, "kvevict_counts_answers"):
        adder.kvevict_counts_answers = True
        adder.memory_budget.total_offset -= sum(
            tree.saved_of_answer(each, int(adder._get_running_request_total_token_offset(each)))
            for each in adder.running_batch.reqs
        )
    return tree.saved_of_answer(req, num_new)


def around_available(original: Callable[..., int | None], budget: PrefillBudget, chunk_limit: int) -> int | None:
    """Hook around the room for a next chunk: a long prompt waits for room, which SGLang would take by force."""
    admission = admission_of(budget.allocator)
    req = None if admission is None else admission.prefilling
    if admission is None or req is None or chunk_limit <= 0:
        return original(budget, chunk_limit)
    wanted = min(chunk_limit, admission.plan.chunk)
    available = min(wanted, int(budget.remaining_total))
    evict_from_tree_cache(budget.tree_cache, max(available, 0))  # a policy that fails keeps no promise
    available = min(available, budget.allocator.available_size())
    rest = len(req.full_untruncated_fill_ids) - req.prefix_len
    # A chunk shorter than the shortest range could not be compressed, and the next one would find still less room.
    admission.is_parked = available < min(wanted, rest, admission.plan.config.min_prefix_tokens)
    return None if admission.is_parked else available


def before_allocation(batch: ScheduleBatch, *_args: object, **_kwargs: object) -> None:
    """Hook before SGLang allocates a prefill: make room before it reads the rows that it writes back afterwards."""
    if admission_of(batch.token_to_kv_pool_allocator) is not None:
        evict_from_tree_cache(batch.tree_cache, batch.extend_num_tokens)


def abort_stuck(result: Any, scheduler: Scheduler) -> None:
    """Abort a long prompt that would wait for room for ever; ``result``: of the choice of the next prefill."""
    admission = admission_of(scheduler.token_to_kv_pool_allocator)
    if admission is None:
        return
    was_parked, admission.is_parked = admission.is_parked, False  # a turn that tries no chunk says nothing about room
    req = admission.prefilling
    if req is None or not was_parked:
        return
    if result.batch_to_run is None and result.running_batch.is_empty():
        logger.error("kvevict: request %s: %s", shown(req.rid), STUCK)
        req.discard_output_reason = FINISH_ABORT(STUCK, HTTPStatus.INTERNAL_SERVER_ERROR)
        scheduler._pending_chunked_abort_req = req


def _num_with_logprobs(req: Req) -> int:
    """Tokens of a prompt whose log-probabilities are asked for."""
    if not req.return_logprob or req.logprob_start_len < 0:
        return 0
    return max(len(req.origin_input_ids) - int(req.logprob_start_len), 0)


def is_long(tree: Any, req: Req | None) -> bool:
    """Whether the chunks of a request's prompt shrink while it is prefilled."""
    return req is not None and isinstance(tree, KVEvictTree) and tree.prefixes.readers[req].chunk_share is not None
