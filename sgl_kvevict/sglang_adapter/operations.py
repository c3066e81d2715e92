"""Hooks on whole-server operations: scoring passes end first, and compressed prefixes with the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.common import release_kv_cache

from sgl_kvevict.guard import Place
from sgl_kvevict.sglang_adapter.passes import SchedulerPasses, admitted
from sgl_kvevict.sglang_adapter.tree import KVEvictTree

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq, UnloadLoRAAdapterReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager


class _NoRid(str):
    """An id that no abort by prefix matches; never sent."""

    __slots__ = ()

    def startswith(self, *_args: Any) -> bool:
        return False


def around_abort(original: Callable[..., None], scheduler: Scheduler, recv_req: AbortReq) -> None:
    """Hook around aborts, which match request ids by prefix: exclude scoring passes, except from ``abort_all``."""
    tree = scheduler.tree_cache
    running = tree.prefixes.passes.running if isinstance(tree, KVEvictTree) else None
    if running is None:
        original(scheduler, recv_req)
    elif recv_req.abort_all:
        with tree.guard.at(Place.PASS):
            tree.prefixes.passes.abort(SchedulerPasses(scheduler))
        original(scheduler, recv_req)
    else:
        name = running.rid
        running.rid = _NoRid()
        try:
            original(scheduler, recv_req)
        finally:
            running.rid = name


def before_flush(scheduler: Scheduler, *_args: Any, **_kwargs: Any) -> None:
    """Hook before a flush: end passes if nothing else runs, so that the server is idle."""
    tree = scheduler.tree_cache
    if isinstance(tree, KVEvictTree):
        end_passes(scheduler, tree)


def before_unload(scheduler: Scheduler, recv_req: UnloadLoRAAdapterReqInput, *_args: Any, **_kwargs: Any) -> None:
    """Hook before a LoRA adapter is unloaded: detach it from the running pass, so SGLang need not wait for it.

    Its result is unused: a reloaded adapter gets a new namespace.
    """
    tree = scheduler.tree_cache
    running = tree.prefixes.passes.running if isinstance(tree, KVEvictTree) else None
    if running is not None and running.lora_id == recv_req.lora_id:
        running.lora_id = None


def before_release_of_memory(manager: SchedulerWeightUpdaterManager, *_args: Any, **_kwargs: Any) -> None:
    """Hook before memory is released, for which SGLang wants an idle server: end passes."""
    scheduler = manager.scheduler
    if scheduler is not None and isinstance(scheduler.tree_cache, KVEvictTree):
        end_passes(scheduler, scheduler.tree_cache)


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


def end_passes(scheduler: Scheduler, tree: KVEvictTree) -> None:
    """End the waiting pass, and the running one if no other request runs."""
    passes, readers = tree.prefixes.passes, tree.prefixes.readers
    passes.withdraw(SchedulerPasses(scheduler))
    running = admitted(scheduler)
    if not any(readers[req].is_pass for req in running):
        return
    if not all(readers[req].is_pass or req.finished() for req in running):
        return
    if scheduler.enable_overlap:
        while scheduler.result_queue:
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
    if scheduler.chunked_req is not None:
        passes.forget_running()
        release_kv_cache(scheduler.chunked_req, tree, checkpoint=False)
        scheduler.chunked_req = None
    scheduler.last_batch = None
    scheduler.running_batch.filter_batch()
    scheduler.running_batch.batch_is_full = False
