"""FlashInfer's own wrapper classes on a CPU: only the module that it compiles for a GPU is replaced, by torch.

The wrapper's constructor, ``plan`` and ``run``, its checks of shapes and dtypes, and its dispatch to the kernels are
those of the installed package.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

CAUSAL, NON_CAUSAL = 1, 0
NHD = 0
BROKEN = [
    RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"),
    FileNotFoundError(2, "No such file or directory", "ninja"),
    subprocess.CalledProcessError(1, ["nvcc", "--version"]),
    PermissionError(13, "Permission denied", "/nowhere/flashinfer"),
]
"""What FlashInfer raises where it cannot compile."""


@dataclass(frozen=True)
class Plan:
    """Arguments of one call of the compiled ``plan``."""

    rows: int
    lens: Tensor
    causal: bool
    window_left: int
    disable_split_kv: bool


class TorchModule:
    """What ``build_and_load`` returns: a paged prefill kernel, in torch float32, row by row.

    As FlashInfer documents its kernels: causal masks and windows are aligned to the ends of queries and keys;
    log-sum-exps have base 2; a row without keys gives 0 and -inf; fa2 without split-KV reads lengths from the device
    when it runs, every other plan holds them.

    Args:
        backend: "fa2" or "fa3".
        plans: filled with every plan.
    """

    def __init__(self, backend: str, plans: list[Plan]) -> None:
        self.backend = backend
        self.plans = plans

    def ragged_run(self, *args: Any) -> None:
        raise AssertionError("not the paged kernel")

    def plan(self, *args: Any) -> list[int]:
        qo_indptr, kv_indptr, kv_lens = args[3:6]
        total, rows, num_qo_heads, num_kv_heads, page_size, is_graph = args[6:12]
        head_dim_qk, head_dim_vo, causal, window_left = args[12:16]
        disable_split_kv = self.backend == "fa2" and args[17]
        assert len(args) == (20 if self.backend == "fa2" else 16)
        assert {x.dtype for x in (qo_indptr, kv_indptr, kv_lens)} == {torch.int32}
        assert qo_indptr.device == kv_indptr.device == kv_lens.device == torch.device("cpu")
        assert (len(qo_indptr), len(kv_indptr), len(kv_lens)) == (rows + 1, rows + 1, rows)
        assert total == int(qo_indptr[-1])
        assert torch.equal(kv_lens, kv_indptr.diff()), "fa3 takes its lengths from here"
        assert page_size == 1 and not is_graph and head_dim_qk == head_dim_vo and num_qo_heads % num_kv_heads == 0
        self.plans.append(Plan(rows, kv_lens, causal, window_left, disable_split_kv))
        return [len(self.plans) - 1]

    def paged_run(self, *args: Any) -> None:
        (index,), q, k_cache, v_cache = args[2:6]
        qo_indptr, kv_indptr, kv_indices, last_page_len, out, lse = args[6:12]
        mask_mode, layout, window_left, enable_pdl = args[12:16]
        sm_scale = args[25] if self.backend == "fa2" else args[21]
        plan = self.plans[index]
        assert (
            layout == NHD and mask_mode == (CAUSAL if plan.causal else NON_CAUSAL) and window_left == plan.window_left
        )
        assert not enable_pdl, "row bounds are written right before"
        assert kv_indptr.dtype == kv_indices.dtype == torch.int32
        assert len(qo_indptr) == len(kv_indptr) == len(last_page_len) + 1 == plan.rows + 1
        assert plan.disable_split_kv or torch.equal(plan.lens, kv_indptr.diff())
        assert q.is_contiguous() and out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
        num_qo_heads, num_kv_heads = q.shape[1], k_cache.shape[2]
        for row in range(plan.rows):
            begin, end = qo_indptr[row : row + 2].tolist()
            pages = kv_indices[int(kv_indptr[row]) : int(kv_indptr[row + 1])].long()
            if begin == end:
                continue
            if not len(pages):
                out[begin:end], lse[begin:end] = 0.0, -torch.inf
                continue
            k, v = (
                cache[pages, 0].float().repeat_interleave(num_qo_heads // num_kv_heads, dim=1)
                for cache in (k_cache, v_cache)
            )
            scores = torch.einsum("qhd,khd->qhk", q[begin:end].float(), k) * sm_scale
            before = torch.arange(len(pages) - (end - begin), len(pages))[:, None] - torch.arange(len(pages))
            hidden = (before < 0) if plan.causal else torch.zeros_like(before, dtype=torch.bool)
            if window_left >= 0:
                hidden |= before > window_left
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
            out[begin:end] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
            lse[begin:end] = scores.logsumexp(-1) / torch.tensor(2.0).log()


class TorchWithoutPinning:
    """``torch`` as FlashInfer sees it: pinned memory is ordinary memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return torch.empty(*args, **kwargs)


def use_torch_kernels(monkeypatch: pytest.MonkeyPatch, auto: str = "fa2") -> list[Plan]:
    """Have FlashInfer's wrappers run on CPU tensors.

    Args:
        monkeypatch: undoes it.
        auto: what backend "auto" stands for.

    Returns:
        A list that gets every plan.
    """
    from flashinfer import prefill

    plans: list[Plan] = []

    def generate(backend: str, *args: Any) -> SimpleNamespace:
        return SimpleNamespace(build_and_load=lambda: TorchModule(backend, plans))

    monkeypatch.setattr(prefill, "torch", TorchWithoutPinning())
    monkeypatch.setattr(prefill, "determine_attention_backend", lambda *args, **kwargs: auto)
    monkeypatch.setattr(prefill, "_gen_batch_prefill_primary_module", generate)
    monkeypatch.setattr(prefill, "gen_batch_prefill_module", generate)
    monkeypatch.setattr(prefill, "_gen_batch_prefill_independent_paged_module", lambda *args: None)
    # Compiled modules are cached by the arguments they were made with.
    monkeypatch.setattr(prefill, "get_batch_prefill_module", prefill.get_batch_prefill_module.__wrapped__)
    return plans
