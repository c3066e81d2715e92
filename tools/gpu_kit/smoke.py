"""What a server of a dense model calls on a GPU, each beside plain torch: a minute that says whether one can work.

    python tools/gpu_kit/smoke.py [--out FOLDER]

Prints a line for each check and writes ``smoke.json``: what each came to ("right", "wrong" or the error), and what does
not work. Exits with 1 if something is wrong, and with 2 if it is something without which no server answers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

DEVICE = "cuda"
DTYPE = torch.bfloat16
MAX_ERROR = 0.02
"""Relative, of the whole result: bfloat16 keeps 8 bits."""
Pairs = list[tuple[Tensor, Tensor]]
"""What came, and what should have come."""


@dataclass(frozen=True)
class Check:
    """One operator.

    Attributes:
        name: in words; begins with the part that is missing if it fails ("FA3 ...").
        run: calls it.
        is_essential: no server answers without it.
    """

    name: str
    run: Callable[[], Pairs]
    is_essential: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for smoke.json")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    verdicts = {check.name: verdict(check) for check in CHECKS}
    failed = [check for check in CHECKS if verdicts[check.name] != "right"]
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "smoke.json").write_text(json.dumps(verdicts, indent=1) + "\n")
    print(f"{len(failed)} of {len(CHECKS)} failed" + "".join(f"; {check.name}" for check in failed), flush=True)
    return 2 if any(check.is_essential for check in failed) else int(bool(failed))


def verdict(check: Check) -> str:
    """Run a check and print its largest relative error and its time; "right", "wrong", or the error's last line."""
    start = time.perf_counter()
    try:
        pairs = check.run()
        torch.cuda.synchronize()
    except Exception as error:  # whatever an operator raises is its result, and the next one is checked
        print(f"FAILED {check.name}, {time.perf_counter() - start:.1f} s\n{traceback.format_exc(limit=-4)}", flush=True)
        return (str(error).splitlines() or [type(error).__name__])[-1][:300]
    worst = max(relative_error(got, expected) for got, expected in pairs)
    is_right = math.isfinite(worst) and worst < MAX_ERROR
    seconds = time.perf_counter() - start
    print(f"{'right ' if is_right else 'WRONG '} {check.name}: {worst:.2e}, {seconds:.1f} s", flush=True)
    return "right" if is_right else "wrong"


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((got.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-9)).item()


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Normally distributed numbers on the device."""
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()


def rmsnorm() -> Pairs:
    """Norms of sgl_kernel, without and with a residual."""
    from sgl_kernel import fused_add_rmsnorm, rmsnorm

    x, residual, weight = random(7, 4096), random(7, 4096), random(4096)
    first = rmsnorm(x, weight, 1e-5), norm(x, weight)
    total = (x.float() + residual.float()).to(DTYPE)
    expected = norm(total, weight)
    fused_add_rmsnorm(x, residual, weight, 1e-5)
    return [first, (x, expected), (residual, total)]


def activation() -> Pairs:
    """SiLU times the gate, compiled by SGLang."""
    from sglang.srt.layers.activation import silu_and_mul

    x = random(7, 2 * 14336)
    gate, up = x.float().chunk(2, -1)
    return [(silu_and_mul(x), torch.nn.functional.silu(gate) * up)]


def rope() -> Pairs:
    """Rotary embedding, compiled by SGLang."""
    from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace as apply

    q, k = random(5, 32, 128), random(5, 8, 128)
    angles = torch.outer(
        torch.arange(64, device=DEVICE).float(), 10000 ** (-torch.arange(64, device=DEVICE).float() / 64)
    )
    cache = torch.cat([angles.cos(), angles.sin()], -1)
    at = torch.tensor([0, 3, 9, 40, 63], device=DEVICE)
    cos, sin = angles[at].cos()[:, None], angles[at].sin()[:, None]

    def turned(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    expected = turned(q), turned(k)
    apply(positions=at, q=q, k=k, cos_sin_cache=cache, is_neox=True)
    return list(zip((q, k), expected, strict=True))


def store() -> Pairs:
    """Rows written to the KV pool, compiled by SGLang."""
    from sglang.kernels.ops.kvcache.kvcache import can_use_store_cache, store_cache

    k, v = random(6, 1024), random(6, 1024)
    k_cache, v_cache = (torch.zeros(64, 1024, device=DEVICE, dtype=DTYPE) for _ in range(2))
    at = torch.tensor([5, 1, 33, 60, 7, 20], device=DEVICE)
    if not can_use_store_cache(2048):
        raise RuntimeError("SGLang has no kernel for rows of 2,048 bytes here")
    store_cache(k, v, k_cache, v_cache, at, row_bytes=2048)
    return [(k_cache[at], k), (v_cache[at], v)]


def merge(is_compiled: bool) -> Pairs:
    """Two partial attentions into one: by sgl_kernel, or by SGLang's Triton kernel, which says that Triton compiles."""
    if is_compiled:
        from sgl_kernel import merge_state_v2 as merge_states
    else:
        from sglang.kernels.ops.attention.merge_state import merge_state_triton as merge_states

    outs = random(5, 8, 128), random(5, 8, 128)
    scores = random(5, 8, dtype=torch.float32), random(5, 8, dtype=torch.float32)
    got, _ = merge_states(outs[0], scores[0], outs[1], scores[1])
    weights = torch.stack(scores).softmax(0)[..., None]
    return [(got, weights[0] * outs[0].float() + weights[1] * outs[1].float())]


def weak_reference() -> Pairs:
    """A tensor that does not own its memory: SGLang's captured graphs need it."""
    from sgl_kernel import weak_ref_tensor

    x = random(5, dtype=torch.float32)
    return [(weak_ref_tensor(x), x)]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """Attention of q [t, heads, d] on k and v [n, kv heads, d], float32; token i sees the keys up to ``first + i``."""
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("thd,nhd->htn", q.float(), k) / q.shape[-1] ** 0.5
    tokens, keys = torch.arange(q.shape[0], device=DEVICE)[:, None], torch.arange(k.shape[0], device=DEVICE)[None]
    return torch.einsum("htn,nhd->thd", scores.masked_fill(keys > first + tokens, -math.inf).softmax(-1), v)


def fa3(head_dim: int, num_new: int, context: int) -> Pairs:
    """FA3 as SGLang's backend calls it: two requests, pages of one slot anywhere in the pool."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    num_heads, num_kv_heads = (32, 8) if head_dim == 128 else (9, 3)
    pool = 2 * context + 64
    k, v = random(pool, 1, num_kv_heads, head_dim), random(pool, 1, num_kv_heads, head_dim)
    lengths = [context, max(num_new, context // 2)]
    table = torch.stack([torch.randperm(pool, device=DEVICE)[:context] for _ in lengths]).int()
    q = random(len(lengths) * num_new, num_heads, head_dim)
    seen = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
    out = flash_attn_with_kvcache(
        q=q,
        k_cache=k,
        v_cache=v,
        page_table=table,
        cache_seqlens=seen,
        cu_seqlens_q=torch.arange(len(lengths) + 1, device=DEVICE, dtype=torch.int32) * num_new,
        cu_seqlens_k_new=torch.cat([seen.new_zeros(1), seen.cumsum(0, dtype=torch.int32)]),
        max_seqlen_q=num_new,
        softmax_scale=head_dim**-0.5,
        causal=True,
    )
    out = out[0] if isinstance(out, tuple) else out
    pairs = []
    for i, length in enumerate(lengths):
        rows, at = slice(i * num_new, (i + 1) * num_new), table[i, :length].long()
        pairs.append((out[rows], dense_attention(q[rows], k[at, 0], v[at, 0], length - num_new)))
    return pairs


CHECKS = (
    Check("rmsnorm, fused_add_rmsnorm (sgl_kernel)", rmsnorm, is_essential=True),
    Check("merge_state_v2 (sgl_kernel)", partial(merge, True)),
    Check("weak_ref_tensor (sgl_kernel)", weak_reference),
    Check("silu_and_mul (SGLang, compiled)", activation, is_essential=True),
    Check("rope (SGLang, compiled)", rope, is_essential=True),
    Check("store_cache (SGLang, compiled)", store, is_essential=True),
    Check("merge_state (SGLang, Triton)", partial(merge, False)),
    *(
        Check(f"FA3, head_dim {width}, {what}", partial(fa3, width, num_new, context))
        for width in (128, 64)
        for what, num_new, context in (
            ("decode", 1, 3000),
            ("64 new tokens", 64, 3000),
            ("700 new tokens, no prefix", 700, 700),
        )
    ),
)
"""Cheap ones first."""

if __name__ == "__main__":
    sys.exit(main())
