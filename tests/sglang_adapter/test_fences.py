"""What orders our writes after the readers of a forward: SGLang's own fences, run on stand-ins of its objects."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock, PropertyMock, call

import pytest
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode, PPProxyTensors
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from sgl_kvevict.sglang_adapter.attention_backend import KVEvictAttentionBackend


def method_calls(mock: MagicMock) -> list[str]:
    """Names of what was called on a stand-in and on its attributes, in order."""
    return [name for name, _, _ in mock.mock_calls]


def test_attention_says_when_it_has_read_what_others_may_write():
    """Compaction runs on the scheduler's stream: ordered after the readers only by this fence."""
    backend = object.__new__(KVEvictAttentionBackend)
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        assert backend.shared_read_ends(mode) is SharedReadEnds.UNKNOWN
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.POST_REPLAY


def executed(mode: ForwardMode, ends: SharedReadEnds) -> MagicMock:
    """A runner that has replayed a captured step."""
    runner = MagicMock()
    runner.model_runner.device_timer = None
    runner._resolve_shared_read_ends.return_value = ends
    runner._process_output_after_replay.return_value = PPProxyTensors({})
    DecodeCudaGraphRunner.execute(runner, SimpleNamespace(forward_mode=mode, batch_size=1))
    return runner


def test_a_captured_step_has_read_when_its_replay_ends():
    runner = executed(ForwardMode.DECODE, SharedReadEnds.POST_REPLAY)
    order = [name for name in method_calls(runner) if name in ("backend.replay", "_publish_read_done")]
    assert order == ["backend.replay", "_publish_read_done"]
    runner._publish_read_done.assert_called_once_with(in_graph=False)
    DecodeCudaGraphRunner._publish_read_done(runner, in_graph=False)
    done = runner.device_module.Event.return_value
    done.record.assert_called_once_with()
    assert runner.model_runner.shared_read_done_event is done


def test_of_a_captured_verification_no_end_is_published_before_the_draft_model_has_read():
    """The scheduler then waits for the whole forward, in which the draft model's forwards follow."""
    runner = executed(ForwardMode.TARGET_VERIFY, SharedReadEnds.UNKNOWN)
    assert "backend.replay" in method_calls(runner) and "_publish_read_done" not in method_calls(runner)


@pytest.mark.parametrize("is_published", [True, False])
def test_the_scheduler_waits_until_attention_is_done(is_published):
    scheduler = MagicMock(_war_barrier_enabled=True)
    event = object() if is_published else None
    scheduler.model_worker.last_shared_read_runner.shared_read_done_event = event
    Scheduler._apply_war_barrier(scheduler)
    waits = [call("wait_event", event) if is_published else call("wait_stream", scheduler.forward_stream)]
    assert [call(name, *given) for name, given, _ in scheduler.schedule_stream.mock_calls] == waits


def test_the_scheduler_waits_before_it_processes_results():
    scheduler = MagicMock(_engine_paused=False)
    type(scheduler).gracefully_exit = PropertyMock(side_effect=[False, True])
    scheduler.is_disable_overlap_for_batch.return_value = False
    Scheduler.event_loop_overlap(scheduler)
    steps = ("ingest_requests", "run_batch", "_apply_war_barrier", "process_batch_result")
    assert [name for name in method_calls(scheduler) if name in steps] == list(steps)


def test_a_forward_waits_for_what_the_scheduler_wrote(monkeypatch):
    scheduler = MagicMock(scripted_scheduler_hook=None, forward_sleep_time=None, enable_overlap=True, forward_ct=0)
    monkeypatch.setattr("sglang.srt.managers.scheduler.resolve_forward_inputs", lambda *_: None)
    batch = MagicMock(extend_num_tokens=0)
    batch.forward_mode.is_prebuilt.return_value = False
    Scheduler.run_batch(scheduler, batch)
    steps = ("forward_stream.wait_stream", "model_worker.forward_batch_generation")
    assert [name for name in method_calls(scheduler) if name in steps] == list(steps)
    scheduler.forward_stream.wait_stream.assert_called_once_with(scheduler.schedule_stream)
