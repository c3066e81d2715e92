"""Compile kernels for sm_90a that a server would otherwise compile when it first uses them. Needs nvcc 13.0, no GPU.

    python tools/gpu_kit/compile_ahead.py [--out out/gpu-kit/compiled] [--only sglang flashinfer]

Run it with SGLang 0.5.23, FlashInfer 0.7.2 and the torch of the GPU machine (2.11): the libraries link against torch's
headers. ``build.py`` packs what it wrote. Each kernel takes 10 to 110 s of CPU time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HEAD_DIMS = (64, 128)
ROW_BYTES = (384, 2048)
"""Bytes of K of one token and layer: 3 KV heads of 64 (SmolLM2), 8 of 128 (llama-8B), bfloat16."""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-kit" / "compiled")
    parser.add_argument("--only", nargs="*", choices=("sglang", "flashinfer"), default=("sglang", "flashinfer"))
    args = parser.parse_args()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    for name in args.only:
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        {"sglang": compile_sglang, "flashinfer": compile_flashinfer}[name](folder)
    return 0


def timed(name: str, call: Callable[[], object]) -> None:
    """Compile something and say how long it took."""
    start = time.monotonic()
    call()
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


def compile_sglang(folder: Path) -> None:
    """SGLang's kernels that a dense bfloat16 model calls: activation, rope, stores to the KV pool, positions."""
    import torch
    from sglang.kernels.jit.utils.compile import loader
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module

    load = loader._load

    def copy_and_load(path: str) -> Any:
        shutil.copy(path, folder)
        return load(path)

    loader._load = copy_and_load
    dtype = torch.bfloat16
    timed("activation", lambda: activation_module(dtype))
    for width in HEAD_DIMS:
        timed(f"rope, head_dim {width}", lambda width=width: _jit_fused_rope_module(True, width, dtype, dtype))
    for size in ROW_BYTES:
        timed(f"store, rows of {size} bytes", lambda size=size: _jit_kvcache_module(size, size, 0))
    timed("clamped positions", lambda: _jit_clamp_position_module(torch.int64))


def compile_flashinfer(folder: Path) -> None:
    """FlashInfer's paged prefill (fa2, head_dim 128), norms, and merges of attention states."""
    import torch
    from flashinfer.jit.attention import modules
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.norm import gen_norm_module

    dtype, width = torch.bfloat16, 128
    shape = (dtype, dtype, dtype, torch.int32, width, width, 0, False, False, False)
    for name, spec in (
        ("fa2", modules._gen_batch_prefill_primary_module("fa2", *shape)),
        ("norm", gen_norm_module()),
        ("cascade", gen_cascade_module()),
    ):
        timed(name, spec.build)
        shutil.copy(spec.jit_library_path, folder / f"{spec.name}.so")


if __name__ == "__main__":
    sys.exit(main())
