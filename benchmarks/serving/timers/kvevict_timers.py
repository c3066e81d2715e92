"""SGLang plugin of the profile benchmark: adds up where a server's forwards spend their time.

A server loads it if its ``PYTHONPATH`` has this folder, and uses it if ``KVEVICT_TIMERS`` names a file. The file holds
seconds by phase and cost, rewritten after every forward. A function's time is its own: what it calls and is timed too
is counted there. A profiler that samples the stack cannot do this on two cores: it gets one when a thread waits at a
barrier, and finds calls with barriers three times as long as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

VARIABLE = "KVEVICT_TIMERS"
FORWARDS = "forwards"
COMPRESSION = "compression"
LINEAR = "linear layers"
ATTENTION = "attention"
PLAN = "attention: plan of the step"
NORMS = "norms, activations, rotary embedding"
COSTS = (COMPRESSION, LINEAR, ATTENTION, PLAN, NORMS)
"""In the order of tables."""

_MODELS, _LAYERS = "sglang.srt.models", "sglang.srt.layers"
#: Functions whose own time is a cost. Of a forward that is the plan, of the whole model what is between its layers.
TARGETS = {
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": PLAN,
    f"{_MODELS}.llama.LlamaForCausalLM.forward": NORMS,
    f"{_LAYERS}.quantization.unquant.UnquantizedLinearMethod.apply": LINEAR,
    f"{_LAYERS}.logits_processor.LogitsProcessor.forward": LINEAR,
    f"{_LAYERS}.radix_attention.RadixAttention.forward": ATTENTION,
    "sgl_kvevict.segments.ranker.Compressor.choose": COMPRESSION,
    "sgl_kvevict.segments.ranker.Compressor.write": COMPRESSION,
}


class Timers:
    """Adds up times by phase: ``decode``, or ``prefill``, to which what happens between forwards counts as well.

    Args:
        path: file to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._phase = "prefill"
        self._inner = 0.0
        self.totals: dict[str, dict[str, float]] = {
            phase: dict.fromkeys((FORWARDS, *COSTS), 0.0) for phase in ("prefill", "decode")
        }

    def around(self, cost: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function and count its own time."""
        before, self._inner = self._inner, 0.0
        begin = perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            took = perf_counter() - begin
            self.totals[self._phase][cost] += took - self._inner
            self._inner = before + took

    def around_forward(self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a forward; its mode says which phase it belongs to."""
        self._phase = "decode" if batch.forward_mode.is_decode() else "prefill"
        try:
            return self.around(PLAN, original, runner, batch, *args, **kwargs)
        finally:
            self.totals[self._phase][FORWARDS] += 1
            self._phase = "prefill"
            self._path.write_text(json.dumps(self.totals), encoding="utf-8")


def register() -> None:
    """Entry point of SGLang's plugins."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    timers = Timers(Path(path))
    for target, cost in TARGETS.items():
        hook = timers.around_forward if cost == PLAN else partial(timers.around, cost)
        HookRegistry.register(target, hook, HookType.AROUND)
