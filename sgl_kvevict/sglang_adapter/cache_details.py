"""What a client is told beside SGLang's ``cached_tokens_details``: what its answer was read from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_kvevict.cache_report import CacheReport
from sgl_kvevict.sglang_adapter.tree import KVEvictTree

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

NOTHING_FOUND: dict[str, int | str] = {"device": 0, "host": 0}
"""Places of a request that found nothing; SGLang reports none then."""
NOTHING_READ = CacheReport().details
"""Of a request that read nothing compressed, and asked for nothing."""


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
