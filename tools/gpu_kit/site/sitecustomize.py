"""SGLang's own kernels compiled beforehand: taken from ``$KIT_PREBUILT``, compiled there if one does not load.

Python imports this at the start of every process that has the kit's ``site`` folder on its path.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
from types import ModuleType
from typing import Any

LOADER = "sglang.kernels.jit.utils.compile.loader"
"""SGLang's module whose ``_find_prebuilt`` looks for a compiled kernel before the compiler is called."""


class PrebuiltFinder(importlib.abc.MetaPathFinder):
    """Finds the loader as usual, and has its look-up ask the kit first."""

    def __init__(self, folder: str) -> None:
        self.folder = pathlib.Path(folder)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        """The spec of the loader, once; None for every other module."""
        if name != LOADER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self.install(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def install(self, module: Any) -> None:
        """Replace the look-up of a loader that has just been imported."""
        usual, tried = module._find_prebuilt, set()

        def find(*, spec: Any, scope: Any) -> Any:
            mine = self.folder / f"{spec.module_name}.so"
            if mine.is_file() and mine not in tried:  # a second look-up means that the library did not load
                tried.add(mine)
                return mine
            return usual(spec=spec, scope=scope)

        module._find_prebuilt = find


if os.environ.get("KIT_PREBUILT"):
    sys.meta_path.insert(0, PrebuiltFinder(os.environ["KIT_PREBUILT"]))
