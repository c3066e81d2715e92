"""A draft model's attention on the harness: what its prefills and decode steps read, and what is recorded of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from helpers.verify_machines import VerifyingHarness
from sgl_kvevict.attention.cpu.torch_attention import TorchAttention
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.sglang_adapter.attention_backend import BatchReaders
from sgl_kvevict.sglang_adapter.draft_attention import (
    DraftAttentionBackend,
    DraftSteps,
    around_capture,
    around_create_backend,
)
from sgl_kvevict.support import BACKEND_NAME

DOCUMENT = [i * 7 % 11 for i in range(40)]
LAYER = SimpleNamespace(layer_id=0, tp_q_head_num=3, qk_head_dim=2, v_head_dim=2, scaling=0.4)


class World:
    """Two requests that read a compressed document, and the draft's attention over random rows."""

    def __init__(self):
        torch.manual_seed(0)
        self.harness = harness = VerifyingHarness()
        harness.finish(harness.run(DOCUMENT))
        self.reqs = [harness.run([*DOCUMENT, *suffix]) for suffix in ([1, 2, 3], [5])]
        self.lens = [len(req.origin_input_ids) for req in self.reqs]
        for req, length in zip(self.reqs, self.lens, strict=True):
            harness._reserve(req, length + 6)
        self.k, self.v = harness.draft_k, harness.draft_v
        self.k.copy_(torch.randn_like(self.k))
        self.v.copy_(torch.randn_like(self.v))
        self.backend = backend = DraftAttentionBackend.__new__(DraftAttentionBackend)
        backend.geometry = KVGeometry(1, 3, 3, 2, harness.num_slots + 1)
        backend.attention = TorchAttention(backend.geometry, self.k, self.v)
        backend.arena, backend.req_to_token_pool = SimpleNamespace(k=self.k), harness.rows
        backend.tree, backend.rows, backend.places = harness.tree, harness.draft_rows, {0: 0}
        backend._window_layers, backend._on_gpu, backend._step, backend.slot_positions = None, False, None, None

    def row(self, i):
        return self.harness.rows.req_to_token[self.reqs[i].kv.req_pool_idx].long()

    def batch(self, mode, seq_lens, **more):
        lens = torch.tensor(seq_lens)
        rows = torch.tensor([req.kv.req_pool_idx for req in self.reqs])
        return SimpleNamespace(
            forward_mode=mode,
            seq_lens=lens,
            seq_lens_cpu=lens,
            req_pool_indices=rows,
            rids=BatchReaders(self.reqs),
            **more,
        )

    def attend(self, i, query, own):
        """One query of a request, [3, 2], over its shadow and the tokens in the slots ``own``."""
        (runs,) = self.harness.tree.draft_paths([self.reqs[i]])[0]
        out = []
        for head in range(3):
            begin, length = int(runs.starts[0, head]), int(runs.lens[0, head])
            k, v = (
                torch.cat([arena.view(-1, 2)[runs.rows[begin : begin + length].long()], arena[0, own, head]])
                for arena in (self.k, self.v)
            )
            out.append((query[head] @ k.T * LAYER.scaling).softmax(-1) @ v)
        return torch.stack(out)


@pytest.fixture
def world():
    return World()


def test_a_prefill_reads_shadows_and_is_recorded(world):
    """All new tokens see their request's shadow and the tokens before them, whose attention is remembered by slot."""
    news = [2, 1]
    slots = torch.cat([world.row(i)[world.lens[i] - new : world.lens[i]] for i, new in enumerate(news)])
    world.backend.rows.paid.zero_()
    world.backend.rows.paid[:, slots] = 1e6  # of tokens that had these slots before
    batch = world.batch(ForwardMode.EXTEND, world.lens, extend_seq_lens_cpu=news, out_cache_loc=slots)
    world.backend.init_forward_metadata(batch)
    queries = torch.randn(3, 6)
    out = world.backend.forward_extend(queries, None, None, LAYER, batch, save_kv_cache=False).view(3, 3, 2)
    compressed_len = world.harness.tree.draft_paths(world.reqs)[0][0].num_tokens
    for place, (i, end) in enumerate(((0, world.lens[0] - 1), (0, world.lens[0]), (1, world.lens[1]))):
        own = world.row(i)[compressed_len:end]
        torch.testing.assert_close(out[place], world.attend(i, queries.view(3, 3, 2)[place], own))
        assert (world.backend.rows.paid[0, own] > 0).all() and (world.backend.rows.paid[0, own] <= 2).all()
    read = torch.cat([world.row(i)[compressed_len : world.lens[i]] for i in range(2)]).unique()
    assert world.backend.rows.paid[0].any(-1).nonzero().squeeze(-1).tolist() == read.tolist()


def test_what_follows_a_verification_is_not_recorded(world):
    slots = torch.cat([world.row(i)[world.lens[i] : world.lens[i] + 4] for i in range(2)])
    world.backend.rows.paid[:, slots] = 1.0
    before = world.backend.rows.paid.clone()
    ends = [length + 4 for length in world.lens]
    batch = world.batch(ForwardMode.DRAFT_EXTEND_V2, ends, extend_seq_lens_cpu=[4, 4], out_cache_loc=slots)
    world.backend.init_forward_metadata(batch)
    world.backend.forward_extend(torch.randn(8, 6), None, None, LAYER, batch, save_kv_cache=False)
    before[:, slots] = 0.0
    assert torch.equal(world.backend.rows.paid, before)


@pytest.mark.parametrize("topk", [1, 2])
def test_a_step_reads_its_own_branch(world, topk):
    """Step i of a branch sees its shadow, the request's tokens, and the branch's own i + 1 drafts."""
    steps = DraftSteps(world.backend, topk, num_steps=3)
    assert len(steps.attn_backends) == 2
    batch = world.batch(ForwardMode.DECODE, world.lens)
    steps.init_forward_metadata(batch)
    compressed_len = world.harness.tree.draft_paths(world.reqs)[0][0].num_tokens
    for i, step in enumerate(steps.attn_backends):
        queries = torch.randn(2 * topk, 6)
        out = step.forward_decode(queries, None, None, LAYER, batch, save_kv_cache=False).view(-1, 3, 2)
        for place, query in enumerate(queries.view(-1, 3, 2)):
            request, branch = divmod(place, topk)
            row, length = world.row(request), world.lens[request]
            own = torch.cat([row[compressed_len:length], row[length + 3 * branch :][: i + 1]])
            torch.testing.assert_close(out[place], world.attend(request, query, own))


def test_sglang_builds_our_steps_and_captures_none():
    """Beside the backends on its list; other backends are left to it."""
    factory = SimpleNamespace(draft_model_runner=SimpleNamespace(attn_backend="ours"), topk=1, speculative_num_steps=3)

    def build(_factory, name, backends, *_args, **_kwargs):
        return backends[name]()

    name, steps = around_create_backend(build, factory, BACKEND_NAME, {}, "", stamps_children=True)
    assert name == BACKEND_NAME and isinstance(steps, DraftSteps) and steps.backend == "ours"
    assert around_create_backend(build, factory, BACKEND_NAME, {}, "") == (BACKEND_NAME, "ours")
    assert around_create_backend(build, factory, "triton", {"triton": lambda: "theirs"}, "") == "theirs"
    worker = SimpleNamespace(draft_attn_backend=steps)
    around_capture(lambda _: pytest.fail("captured"), worker)
    assert worker.cuda_graph_runner is worker.cuda_graph_runner_for_draft_extend is None
    captured = []
    around_capture(captured.append, SimpleNamespace(draft_attn_backend="theirs"))
    assert len(captured) == 1


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
