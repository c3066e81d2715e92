"""One function changes the size of a segment: what it refuses leaves everything as it was."""

from __future__ import annotations

import pytest

from helpers.harness import Harness
from sgl_kvevict.errors import InvariantError


def test_a_resize_gives_no_slots():
    harness = Harness()
    harness.finish(harness.run(list(range(40))))
    segment, resizer = next(iter(harness.tree.prefixes.table.packed)), harness.tree.prefixes.resizer
    held, free = segment.num_slots, harness.allocator.available_size()
    with pytest.raises(InvariantError, match="a resize cannot give a segment of"):
        resizer.resize(segment, held + 1)
    assert (segment.num_slots, harness.allocator.available_size()) == (held, free)
    harness.check()
