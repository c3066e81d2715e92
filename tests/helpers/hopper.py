"""Compile Triton kernels for an NVIDIA H100 on a machine without one.

The interpreter accepts code that the compiler rejects. A process whose Triton interprets cannot compile, so
tests call :func:`ptx_of`, which runs this file in a process of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any


def ptx_of(specs: list[dict[str, Any]], cache_dir: str) -> list[str]:
    """Compile kernels in a fresh process.

    Args:
        specs: per kernel ``{"kernel": "module:function", "args": {name: type or value}}``. Types are strings
            such as "*bf16" or "i32" (pointers are taken as aligned to 16 bytes), any other value is a
            constexpr.
        cache_dir: an empty folder, so that every call compiles.

    Returns:
        The PTX code of every kernel.

    Raises:
        AssertionError: a kernel does not compile; the message holds the compiler's.
    """
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(specs),
        env=env | {"TRITON_CACHE_DIR": cache_dir},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    codes: list[str] = json.loads(run.stdout)
    return codes


def _compile(spec: dict[str, Any]) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    module, _, name = spec["kernel"].partition(":")
    kernel = getattr(importlib.import_module(module), name)
    args = {arg: spec["args"][arg] for arg in kernel.arg_names}
    source = ASTSource(
        fn=kernel,
        signature={arg: value if isinstance(value, str) else "constexpr" for arg, value in args.items()},
        constexprs={(kernel.arg_names.index(arg),): v for arg, v in args.items() if not isinstance(v, str)},
        attrs={(i,): [["tt.divisibility", 16]] for i, value in enumerate(args.values()) if str(value).startswith("*")},
    )
    ptx: str = compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return ptx


if __name__ == "__main__":
    json.dump([_compile(spec) for spec in json.load(sys.stdin)], sys.stdout)
