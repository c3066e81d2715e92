"""SGLang's own runner of captured decode steps on a CPU, where a tape stands in for each CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend

from helpers.graph_tape import GraphTape, recorded


class TapeBackend(BaseCudaGraphBackend):
    """A tape per captured shape."""

    def __init__(self) -> None:
        self._replays: dict[Any, Callable[[], None]] = {}
        self._outputs: dict[Any, Any] = {}

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        self._outputs[shape_key], self._replays[shape_key] = recorded(forward_fn, GraphTape(), "cpu")

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._replays

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        print("REPLAY", static_forward_batch.batch_size, "of", shape_key.size, flush=True)
        self._replays[shape_key]()
        return self._outputs[shape_key]

    def cleanup(self) -> None:
        self._replays.clear()
        self._outputs.clear()


class TapeRunner(DecodeCudaGraphRunner):
    """With tapes, and without the parts of a capture that need streams."""

    def _capture(self) -> None:
        self.warmup()
        self._profiler = None
        self.buffers.seq_lens.fill_(self.seq_len_fill_value)
        self.buffers.seq_lens_cpu.fill_(self.seq_len_fill_value)
        self.buffers.reset_index_buffers()
        with self.backend.capture_session(None):
            self._capture_one_stream()

    def _record_in_graph_metadata_prep_done(self) -> None:
        """Streams and events are no part of this."""


def around_capture_decode_graph(capture: Callable[..., GraphCapture], *, model_runner: Any) -> GraphCapture:
    """Hook of SGLang's choice of a runner, which does not capture on a CPU."""
    return GraphCapture(runner=TapeRunner(model_runner), memory_phase="decode", memory_usage_gb=0, capture_time=0)


def around_resolve_decode_backend(resolve: Callable[..., Any], cuda_graph_runner: Any) -> TapeBackend:
    """Hook of SGLang's choice of a backend, which would record CUDA graphs."""
    return TapeBackend()
