"""An H100 that is not there: SGLang's CUDA branches run on a machine without a GPU.

torch says that there is a device of compute capability 9.0 (``cuda.py``); what is put on it stays on the CPU. Triton
interprets kernels, torch computes what ``sgl_kernel`` and SGLang's compiled kernels would (``kernels.py``), tapes stand
in for CUDA graphs, and gloo for NCCL (``parts.py``). Everything else is the real one: SGLang's resolution of its
arguments for CUDA, attention backends, scheduler, overlap, runner of captured decode steps, and this plugin.

:func:`install` has to run before torch is imported: by a ``sitecustomize`` on PYTHONPATH.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

SITE = "from helpers.fake_gpu import setting_up\n\nsetting_up.install()\n"
"""Text of a ``sitecustomize.py``; ``tests`` has to be on PYTHONPATH too."""
ENV = {
    "TRITON_INTERPRET": "1",
    "SGLANG_PLATFORM": "",  # tests beside it choose the CPU
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "GOMP_SPINCOUNT": "10000",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
PARTS = "helpers.fake_gpu.parts"
"""Module that a server imports first, when SGLang is imported."""


class _After(importlib.abc.MetaPathFinder):
    """Has something done when a module has been imported, before anybody sees it."""

    def __init__(self, name: str, act: Callable[[Any], None]) -> None:
        self.name, self.act = name, act

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self.act(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Fake the device, and the packages of compiled kernels."""
    import importlib

    import torch

    from helpers.fake_gpu import cuda, kernels

    importlib.import_module("helpers.quick_interpreter")
    cuda.install(torch)
    sys.meta_path.insert(0, kernels.StandInFinder())
    sys.meta_path.insert(
        0,
        _After("sglang.kernels.jit.utils.compile.loader", lambda module: setattr(module, "load_jit", kernels.load_jit)),
    )
