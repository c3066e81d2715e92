"""CUDA graphs: which settings we follow, switch off or refuse, and how a replay knows its requests."""

from __future__ import annotations

import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.cuda_graph_config import Backend as GraphBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import ServerArgs

from helpers.harness import TINY_LLAMA
from sgl_kvevict.config import ENV_VAR
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.sglang_adapter.attention_backend import KVEvictAttentionBackend, after_init_new, replayed_readers
from sgl_kvevict.sglang_adapter.plugin import register

OFF = GraphBackend.DISABLED


def test_a_replay_knows_the_requests_of_the_forward_before_it():
    """What it is replayed with has no requests; the runner has those of its last forward."""
    runner, reqs = SimpleNamespace(), [SimpleNamespace(rid="twin"), SimpleNamespace(rid="twin")]
    assert replayed_readers(runner, 3) is None  # of SGLang's warm-up
    for rids, batch in ((["twin", "twin"], reqs), ([], [])):
        after_init_new(SimpleNamespace(rids=rids), object, SimpleNamespace(reqs=batch), runner)
        assert replayed_readers(runner, len(batch)) == tuple(batch)
    with pytest.raises(InvariantError, match="a replay of 2 requests follows a forward of 0"):
        replayed_readers(runner, 2)


def test_dummy_requests_without_a_token_read_one():
    """SGLang's graph runner warms up with decode rows of length 0 when its first warm-up was put off."""
    backend = SimpleNamespace(tree=MagicMock(), _on_gpu=True, req_to_token_pool=MagicMock())
    backend.req_to_token_pool.req_to_token = torch.zeros(4, 8, dtype=torch.int32)
    zeros = torch.zeros(2, dtype=torch.int64)
    batch = KVEvictAttentionBackend._batch(backend, None, [0, 3], None, zeros, torch.tensor([0, 3]))
    assert batch.seq_lens == batch.device_seq_lens.tolist() == [1, 3]
    assert batch.paths == ((), ())


def resolved_graphs(tmp_path, monkeypatch, **flags):
    """Backends of (prefill, decode) where both have graphs by default, as on CUDA."""
    register()
    monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: GraphBackend.BREAKABLE)
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    if flags["attention_backend"] == "kvevict":
        flags["radix_cache_backend"] = "kvevict"
    args = ServerArgs(model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True, **flags)
    args.resolve_once()
    graphs = resolved_view(args).cuda_graph_config
    return graphs.prefill.backend, graphs.decode.backend


def test_graphs_that_are_on_by_default_are_switched_off_where_we_cannot_follow(tmp_path, monkeypatch, caplog):
    on = (GraphBackend.BREAKABLE, GraphBackend.FULL)
    assert resolved_graphs(tmp_path, monkeypatch, attention_backend="triton") == on
    assert resolved_graphs(tmp_path, monkeypatch, attention_backend="kvevict") == (OFF, GraphBackend.FULL)
    assert "CUDA graphs of prefill steps are switched off" in caplog.text
    monkeypatch.setenv(ENV_VAR, json.dumps({"attention": "flashinfer"}))
    assert resolved_graphs(tmp_path, monkeypatch, attention_backend="kvevict") == (OFF, OFF)
    assert "CUDA graphs of decode steps are switched off" in caplog.text


def test_graphs_that_the_user_asked_for_stay_and_are_refused(tmp_path, monkeypatch):
    flags = {"attention_backend": "kvevict", "cuda_graph_backend_prefill": "full"}
    assert resolved_graphs(tmp_path, monkeypatch, **flags) == (GraphBackend.FULL, GraphBackend.FULL)


def test_verification_steps_are_captured(tmp_path, monkeypatch):
    flags = {"attention_backend": "kvevict", "speculative_algorithm": "NGRAM"}
    assert resolved_graphs(tmp_path, monkeypatch, **flags) == (OFF, GraphBackend.FULL)


def test_a_replay_of_drafts_follows_their_trees():
    """Two requests in a step of three: lengths with the drafts, which SGLang counts apart, and what each draft sees."""
    backend, pool = KVEvictAttentionBackend.__new__(KVEvictAttentionBackend), MagicMock()
    pool.req_to_token = torch.zeros(4, 40, dtype=torch.int32)
    backend.runner, backend.attention, backend.req_to_token_pool = SimpleNamespace(), MagicMock(), pool
    backend.arena = SimpleNamespace(k=torch.zeros(1))
    backend.tree, backend._window_layers, backend._on_gpu, backend.slot_positions = None, None, True, None
    backend.init_cuda_graph_state(3, 12)
    chain = torch.ones(4, 4, dtype=torch.bool).tril()
    star = torch.eye(4, dtype=torch.bool) | (torch.arange(4) == 0)
    masks = [torch.cat([torch.ones(4, length, dtype=torch.bool), tree], 1) for length, tree in ((5, chain), (9, star))]
    step = SimpleNamespace(
        batch_size=3,
        num_padding=1,
        forward_mode=ForwardMode.TARGET_VERIFY,
        seq_lens=torch.tensor([5, 9, 1]),
        seq_lens_cpu=torch.tensor([5, 9, 1]),
        req_pool_indices=torch.tensor([2, 3, 0]),
        spec_info=SimpleNamespace(draft_token_num=4, custom_mask=torch.cat([mask.flatten() for mask in masks])),
    )
    backend.init_forward_metadata_out_graph(step, in_capture=True)
    backend.attention.start_capture.assert_called_once_with(3, 4)
    backend.init_forward_metadata_in_graph(step)
    ends, rows, _, visible = backend.attention.start_step.call_args.args
    assert (ends.tolist(), rows.tolist(), visible.tolist()) == ([9, 13, 5], [2, 3, 0], [1] * 12)
    backend.init_forward_metadata_out_graph(step)
    batch, num_requests = backend.attention.follow.call_args.args
    assert (batch.seq_lens, batch.extend_lens, num_requests) == ([9, 13], [4, 4], 3)
    assert visible.tolist() == [1, 3, 7, 15, 1, 3, 5, 9, 1, 1, 1, 1]  # the recorded launches' own memory
