"""Hooks on a scheduler: its start, requests that it queues and answers, turns of its loop, changes of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sgl_kvevict.cache_report import CacheReport
from sgl_kvevict.sglang_adapter.compat import is_on
from sgl_kvevict.sglang_adapter.hooks import LONG_PROMPTS
from sgl_kvevict.sglang_adapter.learning import learn_before_ready
from sgl_kvevict.sglang_adapter.long_prompts import abort_stuck, lift_limits
from sgl_kvevict.sglang_adapter.request_check import check
from sgl_kvevict.sglang_adapter.scheduler_store import fetch, without_waiting
from sgl_kvevict.sglang_adapter.tree import KVEvictTree

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

NOTHING_FOUND: dict[str, int | str] = {"device": 0, "host": 0}
"""Places of a request that found nothing; SGLang reports none then."""
NOTHING_READ = CacheReport().details
"""Of a request that read nothing compressed, and asked for nothing."""


def before_ready(scheduler: Scheduler, *_args: object, **_kwargs: object) -> None:
    """Hook before a scheduler reports that it is ready, and how long prompts may be."""
    if is_on(LONG_PROMPTS):
        lift_limits(scheduler)
    learn_before_ready(scheduler)


def around_queueing(
    original: Callable[..., None], scheduler: Scheduler, req: Req, is_retracted: bool = False, *args: Any, **kwargs: Any
) -> None:
    """Hook around the queueing of a request: check it before, and look into the store afterwards, if it is new."""
    # Before SGLang queues it: a refused one is then queued as an abort, and answered in its turn.
    check(scheduler, req)
    original(scheduler, req, is_retracted, *args, **kwargs)
    # A retracted request has been checked and fetched before.
    if not is_retracted:
        fetch(scheduler, req)


def around_choice(original: Callable[..., Any], scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    """Hook around the choice of the next prefill."""
    result = without_waiting(original, scheduler, *args, **kwargs)
    abort_stuck(result, scheduler)
    return result


def after_ingest(_received: Sequence[object], scheduler: Scheduler, *_args: object, **_kwargs: object) -> None:
    """Hook after SGLang took in new requests: runs once per turn of the loop, between two steps."""
    tree = scheduler.tree_cache
    if isinstance(tree, KVEvictTree):
        for req in scheduler.running_batch.reqs:
            tree.insert_answer(req)
        if tree.prefixes.between_steps():
            # SGLang looks for room again only when a request has ended. Here room comes without that, so requests
            # would wait beside free slots.
            scheduler.running_batch.batch_is_full = False


def after_details(
    found: dict[str, int | str] | None, streamer: SchedulerOutputStreamer, req: Req
) -> dict[str, int | str] | None:
    """Hook after the tokens that a request found were counted by place: add what it has read, if that was compressed.

    Called for each part of an answer that is sent. SGLang's messages allow whole numbers and strings.
    """
    tree = streamer.tree_cache
    report = tree.prefixes.readers[req].report if isinstance(tree, KVEvictTree) else None
    if report is None:
        return found
    details = report.details
    # A request that we have nothing to say about gets what stock SGLang would have sent.
    return found if found is None and details == NOTHING_READ else {**(found or NOTHING_FOUND), **details}


def after_flush(_result: Any, manager: SchedulerWeightUpdaterManager, *_args: Any, **_kwargs: Any) -> None:
    """Hook after the last step of each change of weights, where SGLang flushes its cache, or keeps it.

    Forgets compressed prefixes and observations, even if it keeps it (``flush_cache=False``, or a refused flush),
    because the old weights selected the entries.
    """
    tree = None if manager.scheduler is None else manager.scheduler.tree_cache
    if isinstance(tree, KVEvictTree):
        tree.forget_compressed()


def after_session(result: Any, manager: SchedulerWeightUpdaterManager, *_args: Any, **_kwargs: Any) -> None:
    """Hook after a session of weight updates, which may have written weights without a call; it may be refused."""
    if result.success:
        after_flush(result, manager)
