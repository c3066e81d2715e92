"""One function changes the size of a segment: what it refuses leaves everything as it was."""

from __future__ import annotations

import pytest

from helpers.harness import Harness
from sgl_kvevict.cache.nodes import length_of, path_to
from sgl_kvevict.errors import InvariantError


def in_place(harness: Harness):
    """Segments in place of 40 tokens."""
    harness.finish(harness.run(list(range(40))))
    path = path_to(max(harness.tree.nodes(), key=lambda node: length_of(path_to(node))))
    return harness.tree.prefixes.resizer.range_to(path, length_of(path))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_resize_gives_no_slots(is_packed):
    harness = Harness(waits=True)
    segments, resizer = in_place(harness), harness.tree.prefixes.resizer
    if is_packed:
        resizer.shrink_now(segments, 0.5)
        segments = [span.segment for span in harness.tree.spans.values()]
    segment = segments[0]
    held, free = segment.num_slots, harness.allocator.available_size()
    with pytest.raises(InvariantError, match="a resize cannot give segments of"):
        resizer.resize([segment], held + 1)
    assert (segment.num_slots, harness.allocator.available_size()) == (held, free)
    assert (segment.packed is not None) is is_packed
    harness.check()
