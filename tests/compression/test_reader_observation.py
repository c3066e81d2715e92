"""What is kept of the readers of a prefix, over any number of chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from sgl_kvevict.compression import Compressor, ReaderObservation, Repetition
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import Rotary, build_policy, echo
from sgl_kvevict.policies.echo import echo_attention
from sgl_kvevict.policies.reference import dense_attention
from sgl_kvevict.prefix import SpanStore

GEOMETRY = KVGeometry(num_layers=1, num_qo_heads=4, num_kv_heads=2, head_dim=8, num_token_slots=128)
START, END = 3, 43
"""The range; the path is 50 tokens long."""
ASK, SOURCE, NUM_REPEATED = 5, 16, 20
"""A reader: 5 tokens that ask, then 20 tokens of the range from 16 on once more."""
ANSWER = 50 + ASK
SM_SCALE = 0.3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "BLOCK", 8)
    monkeypatch.setattr(echo, "NUM_BLOCKS", 2)
    monkeypatch.setattr(echo, "NUM_SINKS", 2)


@pytest.fixture
def rotary() -> Rotary:
    angles = torch.arange(200.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    return Rotary(torch.cat([angles.cos(), angles.sin()], 1), True)


@pytest.fixture
def reader(rotary):
    """Queries before and after RoPE, their lse, a key buffer, and the slots of the path and the reader."""
    generator = torch.Generator().manual_seed(0)
    length = ANSWER + NUM_REPEATED
    slots = torch.randperm(127, generator=generator)[:length] + 1
    keys = torch.full((128, 2, 8), torch.nan)
    positions = torch.arange(length)
    keys[slots] = rotary.apply(2 * torch.randn(length, 2, 8, generator=generator), positions)
    plain = 2 * torch.randn(length - 50, 4, 8, generator=generator)
    queries = rotary.apply(plain, positions[50:])
    lse = dense_attention(queries, keys[slots], sm_scale=SM_SCALE, query_start=50)[1]
    return plain, queries, lse, keys, slots


def observe(reader, rotary, cuts=(), repetition=Repetition(ANSWER, SOURCE)):  # noqa: B008 - frozen
    _, queries, lse, keys, slots = reader
    observation = ReaderObservation(GEOMETRY, START, END, rotary)
    bounds = [0, *cuts, queries.shape[0]]
    for begin, end in pairwise(bounds):
        observation.begin_chunk(50 + begin, slots[START:END], repetition)
        observation.record(0, queries[begin:end], lse[begin:end], keys, SM_SCALE)
    return observation.show(0, START, keys, keys, slots[START:END])


def test_echo_is_that_of_the_tokens_read_where_they_stand(reader, rotary):
    """Moved to where the repeated tokens stand, the reader's queries are the prompt's own."""
    plain, _, _, keys, slots = reader
    own = rotary.apply(plain[ASK:], torch.arange(SOURCE, SOURCE + NUM_REPEATED))
    expected = echo_attention(
        own, keys, slots[START:END], sm_scale=SM_SCALE, key_start=START, query_start=SOURCE, rotary=rotary
    )
    found = observe(reader, rotary)
    assert bool((expected > 0).any())
    torch.testing.assert_close(found.echo, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cuts", [(3,), (5,), (6, 7), (2, 12, 20), (24,)])
def test_chunks_change_nothing(reader, rotary, cuts):
    whole, cut = observe(reader, rotary), observe(reader, rotary, cuts)
    torch.testing.assert_close(cut.echo, whole.echo, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(cut.peaks, whole.peaks)


def test_readers_that_repeat_nothing_leave_no_echo(reader, rotary):
    assert observe(reader, rotary, repetition=None).echo is None
    without = observe(reader, None)
    assert without.echo is None and torch.equal(without.peaks, observe(reader, rotary).peaks)


@pytest.mark.parametrize(("name", "options"), [("reconstruction", {}), ("reconstruction", {"use_echo": False})])
def test_prompts_leave_nothing_where_readers_score(rotary, name, options):
    arena = torch.zeros(1, 128, 2, 8)
    policy = build_policy(name, options)
    compressor = Compressor(KVEvictConfig(policy=name), policy, SpanStore(GEOMETRY, arena, arena.clone()), rotary)
    assert not compressor.new_observation().records
