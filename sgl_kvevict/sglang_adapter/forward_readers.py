"""Gives a forward its request objects, because clients choose the request ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sgl_kvevict.errors import InvariantError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class BatchReaders(list[str]):
    """A forward's request ids together with the requests, because two live requests may have the same id."""

    def __init__(self, reqs: Sequence[Req]) -> None:
        super().__init__(req.rid for req in reqs)
        self.reqs = tuple(reqs)


def after_init_new(
    forward: ForwardBatch, _cls: type, batch: ScheduleBatch, runner: ModelRunner, /, *_: Any, **__: Any
) -> None:
    """Hook after a forward is created from a scheduler's batch: attach the requests, and note them at the runner."""
    if forward.rids is not None:
        # A list still, because SGLang hands the ids on; None stays None, which marks a warm-up.
        forward.rids = BatchReaders(batch.reqs)
    # A captured step has no ``rids``. It is replayed before the runner's next forward, so the runner remembers them.
    runner.kvevict_readers = forward.rids


def readers_of(rids: list[str] | None) -> tuple[Req, ...] | None:
    """Return the requests behind ``rids`` of a forward; None in warm-up.

    Raises :class:`InvariantError` if ``rids`` has no requests, because the hook was not applied.
    """
    if rids is None:
        return None
    if not isinstance(rids, BatchReaders):
        raise InvariantError("a forward does not know its requests (the hook on ForwardBatch.init_new was not applied)")
    return rids.reqs


def replayed_readers(runner: ModelRunner, num_requests: int) -> tuple[Req, ...] | None:
    """Return the requests of the captured step that a runner is about to replay; None in warm-up.

    Raises :class:`InvariantError` if the step has another number of requests.
    """
    readers = readers_of(getattr(runner, "kvevict_readers", None))
    if readers is not None and len(readers) != num_requests:
        raise InvariantError(f"a replay of {num_requests} requests follows a forward of {len(readers)}")
    return readers
