"""Small identities and segments for tests of the store."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import torch

from sgl_kvevict.copies import CopiedEntries, CopiedRows, CopiedShadow
from sgl_kvevict.store.identity import FORMAT_VERSION, Namespace, StoreIdentity
from sgl_kvevict.store.segment_file import MAGIC, PREFIX_BYTES, SegmentRecord
from sgl_kvevict.store.segments import SegmentStore, list_segments
from sgl_kvevict.store.workers import Workers

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 4
MIN_PREFIX = 16
SHADOW = CopiedShadow(
    torch.tensor([[2, 0, 3]], dtype=torch.int32),
    torch.tensor([1, 39, 0, 20, 21], dtype=torch.int32),
    torch.arange(30.0).view(5, 6),
    torch.arange(30.0, 60.0).view(5, 6),
    torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25]),
)
"""Rows of a draft model with one layer, three heads and a head dim of 6, of a segment of 40 tokens."""


def drained(workers: Workers, timeout_s: float = 300) -> bool:
    """Wait until all work is done; False: it took longer."""
    return not wait(workers._unfinished.copy(), timeout_s).not_done


def identity(**changes: Any) -> StoreIdentity:
    """A server's identity."""
    base = StoreIdentity(
        model="ab" * 32,
        architecture="LlamaForCausalLM",
        dtype="torch.float32",
        scales=(),
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        own_value_dim=HEAD_DIM,
        rotary="cd" * 32,
        rank=0,
        num_ranks=1,
        policy='{"policy":"snapkv","budget":0.2}',
        min_prefix_tokens=MIN_PREFIX,
    )
    return dataclasses.replace(base, **changes)


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


def record(
    own: StoreIdentity, namespace: Namespace, path: list[int], start: int = 0, seed: int = 0, **changes: Any
) -> SegmentRecord:
    """A segment of the tokens of a path from ``start`` on, with random entries."""
    generator = torch.Generator().manual_seed(seed)
    runs: list[torch.Tensor] = []
    for _ in range(NUM_LAYERS * NUM_HEADS):
        chosen = torch.randperm(len(path) - start, generator=generator)[: 3 + len(runs)].sort().values
        runs.append(chosen.int() + start)
    positions = torch.cat(runs)
    lens = torch.tensor([len(run) for run in runs], dtype=torch.int32).view(NUM_LAYERS, NUM_HEADS)
    rows = torch.randn(2, len(positions), HEAD_DIM, generator=generator).to(getattr(torch, own.dtype[6:]))
    base = SegmentRecord(
        key=namespace.segment(path, start),
        identity=own.digest,
        start=start,
        end=len(path),
        splittable=True,
        tokens=torch.tensor(path),
        kept=CopiedEntries(
            CopiedRows(lens, positions, rows[0], rows[1], torch.arange(len(positions), dtype=torch.int16))
        ),
    )
    return dataclasses.replace(base, **changes)


def completed(ours: SegmentRecord) -> SegmentRecord:
    """A segment, and all its other entries as evicted ones."""
    part, end = ours.kept.rows, ours.end
    runs = torch.arange(part.keep_lens.numel()).repeat_interleave(part.keep_lens.flatten().long())
    is_kept = torch.zeros(part.keep_lens.numel(), end, dtype=torch.bool)
    is_kept[runs, part.positions.long()] = True
    is_kept[:, : ours.start] = True
    positions = (~is_kept).nonzero()[:, 1].int()
    lens = (~is_kept).sum(1, dtype=torch.int32).view(part.keep_lens.shape)
    k, v = (torch.arange(len(positions) * part.k.shape[1]).view(-1, part.k.shape[1]).to(part.k.dtype) for _ in "kv")
    order = torch.arange(len(positions), dtype=torch.int16).flip(0)
    return dataclasses.replace(ours, evicted=CopiedRows(lens, positions, k, v, order))


def keys_in(store: SegmentStore) -> list[str]:
    """Names of the segments of a store's identity."""
    return [each.key for each in list_segments(store.backend) if each.identity == store.identity.digest]


def with_rows(ours: SegmentRecord, **changes: Any) -> SegmentRecord:
    """A record whose entries differ."""
    rows = dataclasses.replace(ours.kept.rows, **changes)
    return dataclasses.replace(ours, kept=dataclasses.replace(ours.kept, rows=rows))


def assert_same(ours: SegmentRecord, theirs: SegmentRecord) -> None:
    """Every field and every bit is the same."""
    a, b = ours.tensors, theirs.tensors
    assert a.keys() == b.keys()
    for name in a:
        same = a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
        assert same and torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name
    for field in ("key", "identity", "start", "end", "splittable"):
        assert getattr(ours, field) == getattr(theirs, field), field


def sealed(payload: bytes, version: int = FORMAT_VERSION, length: int | None = None) -> bytes:
    """A file with a right checksum, as somebody would make it who knows the format."""
    head = MAGIC + version.to_bytes(8, "little") + (len(payload) if length is None else length).to_bytes(8, "little")
    return head + hashlib.sha256(head + payload).digest() + payload


def with_header(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A file whose header of tensors somebody has changed, with a right checksum."""
    payload = data[PREFIX_BYTES:]
    length = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + length])
    change(header)
    text = json.dumps(header, ensure_ascii=False).encode()
    return sealed(len(text).to_bytes(8, "little") + text + payload[8 + length :])
