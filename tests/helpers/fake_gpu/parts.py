"""What is replaced in SGLang and in this plugin on the faked GPU, once both are imported."""

from __future__ import annotations

from typing import Any

import flashinfer.utils
import pytest
import sglang.srt.model_executor.runner.decode_cuda_graph_runner as graph_runner
import torch.distributed as dist

from helpers.tape_runner import around_resolve_decode_backend
from helpers.torch_flashinfer import use_torch_kernels
from kvevict_kernels import dispatch
from sgl_kvevict import support
from sgl_kvevict.attention import kernel_facts


def over_gloo(call: Any) -> Any:
    """A function that makes process groups, with gloo for NCCL."""

    def made(*args: Any, **kwargs: Any) -> Any:
        for name in ("device_id", "pg_options"):
            kwargs.pop(name, None)
        if "nccl" in str(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
        return call(*(("gloo" if "nccl" in str(arg) else arg) for arg in args), **kwargs)

    return made


dist.init_process_group = over_gloo(dist.init_process_group)
dist.new_group = over_gloo(dist.new_group)

# Tensors say that they are on the CPU: have our kernels and our choice of attention take it for the device.
dispatch.TRITON_DEVICES = ("cuda", "cpu")
kernel_facts.AUTO["cpu"] = "triton"
for table in (support.IMPLEMENTATION, support.ATTENTION, support.AFTER_LOAD):
    del table["attention on another device"]  # type: ignore[attr-defined]

resolve_backend = graph_runner.resolve_decode_backend
graph_runner.resolve_decode_backend = lambda runner: around_resolve_decode_backend(resolve_backend, runner)

# FlashInfer's wrappers are the real ones; the module that they would compile is torch's.
patch = pytest.MonkeyPatch()
use_torch_kernels(patch)
patch.setattr(flashinfer.utils, "get_compute_capability", lambda device: (9, 0))
