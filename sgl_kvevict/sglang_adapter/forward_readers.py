"""The readers of a forward: SGLang's request objects, never ids that clients chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sgl_kvevict.errors import InvariantError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class BatchReaders(list[str]):
    """The request ids of a forward, as SGLang keeps them, and the requests themselves.

    Two live requests may have one id: clients choose them. SGLang copies a batch's ``rids`` to every view of the
    batch, so the requests travel with them.

    Args:
        reqs: the batch's requests, in its order.
    """

    def __init__(self, reqs: Sequence[Req]) -> None:
        super().__init__(req.rid for req in reqs)
        self.reqs = tuple(reqs)


def after_init_new(forward_batch: ForwardBatch, _cls: type, batch: ScheduleBatch, *_args: Any, **_kwargs: Any) -> None:
    """Hook after a forward was made of a scheduler's batch: it knows its requests."""
    if forward_batch.rids is not None:
        forward_batch.rids = BatchReaders(batch.reqs)


def readers_of(rids: list[str] | None) -> tuple[Req, ...] | None:
    """Return the requests of a forward; None for a forward without requests (warm-up).

    Args:
        rids: ``rids`` of the forward, or of a view of it.

    Raises:
        InvariantError: the forward does not know its requests: the hook was not applied.
    """
    if rids is None:
        return None
    if not isinstance(rids, BatchReaders):
        raise InvariantError("a forward does not know its requests (the hook on ForwardBatch.init_new was not applied)")
    return rids.reqs
