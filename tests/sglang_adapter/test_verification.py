"""Verification steps on the harness: what is accepted, counted and given back."""

from __future__ import annotations

from helpers.verify_machines import VerifyingHarness

DOCUMENT = [i * 7 % 11 for i in range(40)]


def test_tokens_behind_the_stop_are_given_back():
    """A step accepts more than the answer has room for: the tree gets the answer, the allocator the rest."""
    harness = VerifyingHarness()
    req = harness.run(DOCUMENT)
    harness.verify(req, [0, 1, 2, 3], 5)
    kept = len(DOCUMENT) + len(req.output_ids) - 2
    harness.finish(req, num_beyond_stop=2)
    assert sum(len(node.key) for node in harness.tree.nodes()) == kept
    assert not harness.live


def test_the_draft_reads_rows_of_its_own():
    """As many as the segment's slots have room for, also when it comes back from the host."""
    harness = VerifyingHarness(host_blocks=40)
    harness.finish(harness.run(DOCUMENT))
    reader = harness.run([*DOCUMENT, 1])
    ((runs,),) = harness.tree.draft_paths([reader])
    (span,) = harness.tree.spans.values()
    num_rows = 3 * span.segment.num_slots
    assert runs.lens.sum() == num_rows and runs.num_tokens == span.num_tokens
    before = harness.num_draft_rows_read
    harness.verify(reader, [0, 1, 2], 4)
    assert harness.num_draft_rows_read == before + num_rows
    harness.finish(reader)
    harness.evict(harness.num_slots)
    assert not len(harness.tree.spans)
    again, before = harness.run([*DOCUMENT, 2]), harness.num_draft_rows_read
    assert harness.tree.prefixes.totals.moved_in_segments == 1
    harness.verify(again, [0], 4)
    assert harness.num_draft_rows_read == before + num_rows
