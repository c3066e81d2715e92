"""What ``GET /server_info`` shows of the compressed cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController


def add_state(_result: None, controller: SchedulerInternalStateController, state: dict[str, Any]) -> None:
    """Hook after SGLang filled one scheduler's internal state: add the key ``kvevict`` when our tree serves.

    Args:
        controller: SGLang's controller; holds the live scheduler.
        state: the dictionary being filled; values must be plain numbers, strings, lists and dictionaries.
    """
    from sgl_kvevict.sglang_adapter.tree import KVEvictTree

    tree = controller.scheduler.tree_cache
    if isinstance(tree, KVEvictTree):
        state["kvevict"] = tree.state()
