"""Hooks on whole-server operations (flush, abort, weight change): scoring passes end first."""

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


def around_session_change(
    original: Callable[..., Any], manager: SchedulerWeightUpdaterManager, *args: Any, **kwargs: Any
) -> Any:
    """Hook around weight changes that need a session; SGLang refuses them without one, so the cache stays."""
    if manager._session is None:
        return original(manager, *args, **kwargs)
    return around_change(original, manager, *args, **kwargs)


def around_change(
    original: Callable[..., Any], manager: SchedulerWeightUpdaterManager, *args: Any, **kwargs: Any
) -> Any:
    """Hook around every operation that may change the weights or needs an idle server.

    Ends passes first. Afterwards forgets all compressed prefixes, scores and observations, even if SGLang keeps its
    cache (``flush_cache=False``, or a refused flush), because the old weights selected the entries. Also after a
    failure, which may have loaded part of the weights.
    """
    scheduler = manager.scheduler
    tree = None if scheduler is None else scheduler.tree_cache
    if scheduler is None or not isinstance(tree, KVEvictTree):
        return original(manager, *args, **kwargs)
    end_passes(scheduler, tree)
    try:
        return original(manager, *args, **kwargs)
    finally:
        tree.forget_compressed()


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
