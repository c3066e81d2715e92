"""What is kept of the readers of a prefix, over any number of chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from sgl_kvevict.compression import Compressor, ReaderObservation
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import Rotary, build_policy, echo
from sgl_kvevict.policies.echo import echo_attention
from sgl_kvevict.policies.reference import dense_attention
from sgl_kvevict.prefix import SpanStore

GEOMETRY = KVGeometry(num_layers=1, num_qo_heads=4, num_kv_heads=2, head_dim=8, num_token_slots=128)
START, END = 3, 43
"""The range; the path is 50 tokens long."""
SOURCE, NUM_READ = 16, 20
"""A reader that reads 20 tokens of the range once more, from 16 on."""
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
def text(rotary):
    """Queries of the part that is read again, before RoPE; a key buffer; the slots of the path."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(127, generator=generator)[:50] + 1
    keys = torch.full((128, 2, 8), torch.nan)
    keys[slots] = rotary.apply(2 * torch.randn(50, 2, 8, generator=generator), torch.arange(50))
    return 2 * torch.randn(NUM_READ, 4, 8, generator=generator), keys, slots


def read_again(text, rotary, cuts=()):
    plain, keys, slots = text
    queries = rotary.apply(plain, torch.arange(NUM_READ))
    observation = ReaderObservation(GEOMETRY, START, END, rotary)
    for begin, end in pairwise([0, *cuts, NUM_READ]):
        observation.begin_chunk(begin, slots[START:END], SOURCE + begin)
        observation.record(0, queries[begin:end], torch.zeros(end - begin, 4), keys, SM_SCALE)
    return observation.show(0, START, keys, keys, slots[START:END])


def test_tokens_read_alone_echo_as_they_do_where_they_stand(text, rotary):
    plain, keys, slots = text
    own = rotary.apply(plain, torch.arange(SOURCE, SOURCE + NUM_READ))
    expected = echo_attention(
        own, keys, slots[START:END], sm_scale=SM_SCALE, key_start=START, query_start=SOURCE, rotary=rotary
    )
    found = read_again(text, rotary)
    assert bool((expected > 0).any()) and found.peaks is None
    torch.testing.assert_close(found.echo, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cuts", [(3,), (5,), (6, 7), (2, 12, 19)])
def test_chunks_change_nothing(text, rotary, cuts):
    torch.testing.assert_close(read_again(text, rotary, cuts).echo, read_again(text, rotary).echo)


def test_readers_behind_the_range_leave_peaks_alone(text, rotary):
    plain, keys, slots = text
    lse = dense_attention(plain, keys[slots], sm_scale=SM_SCALE, query_start=50)[1]
    observation = ReaderObservation(GEOMETRY, START, END, rotary)
    observation.begin_chunk(50, slots[START:END])
    observation.record(0, plain, lse, keys, SM_SCALE)
    found = observation.show(0, START + 7, keys, keys, slots[START + 7 : END])
    weights = (torch.einsum("qgd,kd->gqk", plain[:, :2], keys[slots[START + 7 : END], 0]) * SM_SCALE).exp()
    weights = weights / lse[:, :2].T.exp()[..., None]
    assert found.echo is None
    torch.testing.assert_close(found.peaks[0], weights.amax((0, 1)))


@pytest.mark.parametrize(("name", "options"), [("reconstruction", {}), ("reconstruction", {"use_echo": False})])
def test_prompts_leave_nothing_where_readers_score(rotary, name, options):
    arena = torch.zeros(1, 128, 2, 8)
    policy = build_policy(name, options)
    compressor = Compressor(KVEvictConfig(policy=name), policy, SpanStore(GEOMETRY, arena, arena.clone()), rotary)
    assert not compressor.new_observation().records
