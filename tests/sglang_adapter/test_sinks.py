"""The first tokens of a path stay in every KV head, however short the segment that holds them has become."""

from __future__ import annotations

from helpers.harness import Harness
from sgl_kvevict.config import KVEvictConfig

CONFIG = KVEvictConfig(budget=0.3, min_budget=0.1, tail_tokens=4, sink_tokens=4, min_prefix_tokens=6)
DOCUMENT = [(3 * i + 3) % 11 for i in range(60)]


def test_the_rest_of_a_document_keeps_the_sinks_that_another_prompt_reads():
    """What is left of a dropped document may be the few tokens with which every prompt's template begins."""
    harness = Harness(config=CONFIG, host_blocks=60)
    document = harness.request(DOCUMENT)
    assert harness.admit(document) and harness.prefill(document)
    harness.finish(document)
    reader = harness.request([*DOCUMENT[:4], 1, 2, 1])
    assert harness.admit(reader) and reader.prefix_len == 4 and harness.prefill(reader)
    while harness.evict(1):
        pass
    while harness.tree.prefixes.pressure.reclaim(None):
        pass
    (rest,) = (span for span in harness.tree.spans.values() if span.end == 4)
    assert rest.segment.num_slots == 4 and rest.runs()[0].lens.eq(4).all()
    harness.decode(reader)
    harness.finish(reader)
