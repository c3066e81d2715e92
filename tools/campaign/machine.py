"""Random operations on the harness with real policies: every forward reads back what its request may read."""

from __future__ import annotations

import random
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from campaign.parts import Counts
from sglang.srt.managers.schedule_batch import Req
from torch import distributed

from helpers.harness import Harness, publish_server_args
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies.by_name import build_policy
from sgl_kvevict.sglang_adapter.tree import KVEvictTree

POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("d2o", {}),
    ("k-vec", {}),
    ("chunkkv", {"reuse_layers": 2}),
    ("snapkv", {}),
)
TWO_RANKS = "two ranks"
DOCUMENTS = ([i * 7 % 11 for i in range(70)], [i * 5 % 7 for i in range(70)])
OFTEN = {"submit": 6, "chunk": 4, "decode": 4, "finish": 4, "retract": 1, "abort": 1, "drop": 2}
ACTIONS = [action for action, times in OFTEN.items() for _ in range(times)]
RARE = ["flush", "weights", "pause"]
NAMESPACES = ((None, None), (None, None), (None, None), ("tenant", None), (None, "salt"), ("tenant", "salt"))
"""extra_key and cache_salt; a LoRA adapter is an extra_key for the tree."""


class MergedHarness(Harness):
    """For policies that store weighted sums of entries: a token's code says where its text began, and nothing more.

    A sum over tokens of one text is that code again; a token of another text or namespace changes it.
    """

    def _codes(self, req: Req, end: int) -> list[float]:
        code = zlib.crc32(repr((req.extra_key, req.cache_salt, req.origin_input_ids[0])).encode()) % 1000
        tokens = [*req.origin_input_ids, *req.output_ids]
        return [float(code)] * len(tokens[:end])

    def _check_rows(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


class RankHarness(Harness):
    """A tensor-parallel rank: its own heads attend to other tokens, so that it keeps other entries.

    Attributes:
        rank: from 0.
    """

    rank: int = 0

    def _queries(self, count: int) -> torch.Tensor:
        shape = (count, self.geometry.num_qo_heads, self.geometry.head_dim)
        return 1e-3 * torch.randn(shape, generator=torch.Generator().manual_seed(count + 100_000 * self.rank))


class MergedRankHarness(RankHarness, MergedHarness):
    """The same for policies that merge."""


@cache
def _published() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    publish_server_args(Path(folder.name))
    return folder


def build(name: str, options: dict[str, Any], rank: int = 0, group: distributed.ProcessGroup | None = None) -> Harness:
    """A small cache with a real policy; of a rank of two if there is a group."""
    _published()
    config = KVEvictConfig(
        policy=name, budget=0.4, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6, policy_options=options
    )
    kinds = (Harness, MergedHarness) if group is None else (RankHarness, MergedRankHarness)
    kind = kinds[name == "d2o"]
    harness = kind(num_slots=200, num_rows=6, config=config, policy=build_policy(name, options), group=group)
    harness.rank = rank
    return harness


def drive(harness: Harness, rng: random.Random, steps: int) -> None:
    """Do random operations; the harness checks contents and conservation after each."""
    for _ in range(steps):
        action = rng.choice(RARE) if rng.random() < 0.01 else rng.choice(ACTIONS)
        _act(harness, rng, action)
    _take_off_all(harness)
    total = harness.allocator.available_size() + harness.tree.evictable_size()
    assert total == harness.num_slots and harness.tree.protected_size() == 0
    assert not any(harness.tree.guard.errors.values())


def _act(harness: Harness, rng: random.Random, action: str) -> None:
    decoding = [req for req in harness.live if req.output_ids]
    prefilling = [req for req in harness.live if not req.output_ids]
    if action == "submit":
        _submit(harness, rng)
    elif action == "chunk" and prefilling:
        req = rng.choice(prefilling)
        harness.prefill(req, req.prefix_len + rng.choice([1, 7, 30, 200]))
    elif action == "drop":
        harness.evict(rng.choice([5, 20, 60]))
    elif action == "weights":
        harness.tree.forget_compressed()
    elif action == "pause":
        _pause(harness, rng)
    elif action == "abort" and harness.live:
        harness.abort(rng.choice(harness.live))
    elif action == "flush" and not harness.live:
        harness.flush()
    elif decoding and action in ("decode", "finish", "retract"):
        getattr(harness, action)(rng.choice(decoding))


def _take_off_all(harness: Harness) -> None:
    for req in tuple(harness.live):
        harness.retract(req) if req.kv.holds_kv else harness._cancel(req)


def _pause(harness: Harness, rng: random.Random) -> None:
    """Everything that runs is taken off; while it is, the cache may be flushed."""
    _take_off_all(harness)
    if rng.random() < 0.5:
        harness.flush()


def _submit(harness: Harness, rng: random.Random) -> None:
    base = rng.choice(DOCUMENTS)[: rng.choice([0, 9, 20, 35, 50, 70])]
    suffix = [rng.randrange(11) for _ in range(rng.randrange(1, 12))]
    extra_key, salt = rng.choice(NAMESPACES)
    req = harness.request(base + suffix, extra_key)
    req.cache_salt = salt
    req.rid = rng.choice(["same", "other"])
    req.sampling_params.max_new_tokens = rng.choice([1, 3, 8])
    if harness.admit(req) and rng.random() < 0.7:
        harness.prefill(req)


def unit(seed: int, share: float) -> Counts:
    """One cache of one policy, or two tensor-parallel ranks; each policy comes with either."""
    steps = int(2000 * share)
    rounds, number = divmod(seed, len(POLICIES) + 1)
    has_two_ranks = number == len(POLICIES)
    name, options = POLICIES[rounds % len(POLICIES) if has_two_ranks else number]
    try:
        if has_two_ranks:
            _drive_two_ranks(name, options, seed, steps)
        else:
            drive(build(name, options), random.Random(seed), steps)
    except Exception as error:
        ranks = ", two ranks" if has_two_ranks else ""
        raise AssertionError(f"policy {name} {options}{ranks}, seed {seed}, {steps} steps") from error
    return {"done": steps, f"operations with {TWO_RANKS if has_two_ranks else name}": steps}


def _drive_two_ranks(name: str, options: dict[str, Any], seed: int, steps: int) -> None:
    """The same operations on two ranks that keep other entries; their trees must stay the same, slot for slot."""
    store = distributed.HashStore()

    def rank(number: int) -> list[tuple[int, int]]:
        group = distributed.ProcessGroupGloo(store, number, 2, timedelta(seconds=60))
        harness = build(name, options, number, group)
        drive(harness, random.Random(seed), steps)
        return [(len(node.key), harness.tree.node_slots(node)) for node in harness.tree.nodes()]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert first == second


@contextmanager
def requests_known_by_name() -> Iterator[None]:
    """Mutation: what a forward reads is looked up by the name that a client chose, as it once was."""
    original = KVEvictTree.read_paths

    def by_name(tree: Any, readers: Any) -> Any:
        named = {req.rid: req for req in sorted(tree.prefixes.readers, key=lambda req: req.rid)}
        return original(tree, [named.get(req.rid, req) for req in readers])

    KVEvictTree.read_paths = by_name  # type: ignore[method-assign]
    try:
        yield
    finally:
        KVEvictTree.read_paths = original  # type: ignore[method-assign]
