"""Compile Triton kernels for NVIDIA GPUs on a machine without one, and read what came out.

The interpreter accepts code that the compiler rejects, and knows nothing of registers, shared memory and copies in
flight. A process whose Triton interprets cannot compile, so tests call :func:`compile_all`, which runs this file in a
process of its own, with any Python that has torch and triton.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Spec = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]


def compile_all(specs: list[Spec], cache_dir: str, python: str = sys.executable) -> list[dict[str, Any]]:
    """Compile kernels in a fresh process.

    Args:
        specs: from :mod:`helpers.gpu_kernels`: per kernel its module and name, the architecture, types (strings) or
            values (constants) of arguments, and options. Pointers are taken as aligned to 16 bytes where the kernel
            tells them apart.
        cache_dir: where Triton keeps what it compiled; an empty folder, and everything is compiled.
        python: interpreter.

    Returns:
        Per kernel ``ptx``, ``registers`` and ``stack`` (bytes) of a thread, ``shared`` (bytes of a program),
        ``warps``, and of the loop with the products, None without such a loop: ``in_flight``, groups of copies that it
        leaves unfinished when it waits; ``instructions`` of a warp in one pass. ``loads_before_keys``: of global
        memory, one after the other, before the first row of K or V; None without asynchronous copies.
        ``loads_behind_wait``: the same behind the wait for the kernel before it, or of the whole kernel.

    Raises:
        AssertionError: a kernel does not compile; the message holds the compiler's.
    """
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "kernels")])
    run = subprocess.run(
        [python, "-P", __file__],  # else modules of this folder would hide those of Python (statistics)
        input=json.dumps(specs),
        env=env | {"TRITON_CACHE_DIR": cache_dir, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: list[dict[str, Any]] = json.loads(run.stdout)
    return found


def _compile(spec: Spec) -> dict[str, Any]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from helpers.gpu_kernels import type_of
    from helpers.sass import common_path, copies_in_flight, loads_before, loads_behind, parse

    module, _, name = spec["kernel"].partition(":")
    kernel = getattr(importlib.import_module(module), name)
    args = {arg: spec["args"].get(arg, type_of(arg)) for arg in kernel.arg_names}
    told_apart = {param.name for param in kernel.params if not param.do_not_specialize_on_alignment}
    source = ASTSource(
        fn=kernel,
        signature={arg: value if isinstance(value, str) else "constexpr" for arg, value in args.items()},
        constexprs={(kernel.arg_names.index(arg),): v for arg, v in args.items() if not isinstance(v, str)},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, (arg, value) in enumerate(args.items())
            if arg in told_apart and (str(value).startswith("*") or arg in spec.get("divisible", ()))
        },
    )
    target = GPUTarget("cuda", spec.get("arch", 90), 32)
    compiled = compile(source, target=target, options=spec.get("options", {}))
    ptx: str = compiled.asm["ptx"]
    registers, stack = _usage(compiled.asm["cubin"])
    code = parse(_dump(compiled.asm["cubin"], "--dump-sass"))
    return {
        "ptx": ptx,
        "registers": registers,
        "stack": stack,
        "shared": int(compiled.metadata.shared),
        "warps": int(compiled.metadata.num_warps),
        "in_flight": copies_in_flight(code),
        "instructions": len(common_path(code)) or None,
        "loads_before_keys": loads_before(code),
        "loads_behind_wait": loads_behind(code),
    }


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread; what does not fit into registers is on the stack."""
    text = _dump(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def _dump(cubin: bytes, what: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), what, file.name], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    json.dump([_compile(spec) for spec in json.load(sys.stdin)], sys.stdout)
