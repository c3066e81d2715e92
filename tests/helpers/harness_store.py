"""What a harness's server would store under, and how its segments leave and come back."""

from __future__ import annotations

from helpers.harness import Harness
from sgl_kvevict.lifecycle.stored import Adoption, export_segment
from sgl_kvevict.store import SegmentRecord, StoreIdentity, decode_segment, encode_segment

IDENTITY = StoreIdentity(
    model="ab" * 32,
    architecture="LlamaForCausalLM",
    dtype="torch.float32",
    scales=(),
    num_layers=2,
    num_kv_heads=2,
    head_dim=2,
    rotary="cd" * 32,
    rank=0,
    num_ranks=1,
    policy="pseudo-random",
    min_prefix_tokens=6,
)


def exported(harness: Harness, tail: int = 4) -> list[SegmentRecord]:
    """All segments of a harness, through bytes and back, those nearest the root first."""
    tree = harness.tree
    records = []
    for node, span in tree.spans.items():
        if span.end == span.segment.end:
            leaving = export_segment(node, tree.port, tree.spans, tree.store, IDENTITY, tail)
            assert leaving is not None
            record = leaving.record()
            records.append(decode_segment(encode_segment(record), record.key))
    return sorted(records, key=lambda record: record.start)


def adoption(harness: Harness) -> Adoption:
    """What brings segments into a harness's tree."""
    manager = harness.tree.manager
    return Adoption(harness.tree.port, manager.spans, manager.ranges, manager.readers, harness.tree.store)
