"""Gives a forward its request objects, because clients choose the request ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sgl_kvevict.errors import InvariantError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class BatchReaders(list[str]):
    """A forward's request ids together with the requests, because two live requests may have the same id.

    SGLang copies ``rids`` to every view of a batch, so the requests go along.
    """

    def __init__(self, reqs: Sequence[Req]) -> None:
        super().__init__(req.rid for req in reqs)
        self.reqs = tuple(reqs)


def after_init_new(forward_batch: ForwardBatch, _cls: type, batch: ScheduleBatch, *_args: Any, **_kwargs: Any) -> None:
    """Hook after a forward is created from a scheduler's batch: attach the requests."""
    if forward_batch.rids is not None:
        forward_batch.rids = BatchReaders(batch.reqs)


def readers_of(rids: list[str] | None) -> tuple[Req, ...] | None:
    """Return the requests behind ``rids`` of a forward or its view; None in warm-up.

    Raises :class:`InvariantError` if ``rids`` has no requests, because the hook was not applied.
    """
    if rids is None:
        return None
    if not isinstance(rids, BatchReaders):
        raise InvariantError("a forward does not know its requests (the hook on ForwardBatch.init_new was not applied)")
    return rids.reqs
