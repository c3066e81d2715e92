"""Hooks on turns of the scheduler's loop, and on changes of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sgl_kvevict.sglang_adapter.tree import KVEvictTree

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager


def after_ingest(_received: Sequence[object], scheduler: Scheduler, *_args: object, **_kwargs: object) -> None:
    """Hook after SGLang took in new requests: runs once per turn of the loop, between two steps."""
    tree = scheduler.tree_cache
    if isinstance(tree, KVEvictTree):
        tree.prefixes.between_steps()


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
