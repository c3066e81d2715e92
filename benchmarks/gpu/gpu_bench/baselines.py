"""Attention over uncompressed tokens, by the kernels that servers use: what ours is measured against.

Every request has its own keys, one token slot a page, as SGLang serves them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_bench.clock import device_seconds
from gpu_bench.setting import Setting

Call = Callable[[int], object]
WORKSPACE_BYTES = 384 * 2**20


class Uniform:
    """Requests over as many keys each, layer after layer.

    Args:
        setting: sizes.
        count: requests.
        keys: of each.
        new_tokens: of each; they are the last of the keys.
    """

    def __init__(self, setting: Setting, count: int, keys: int, new_tokens: int) -> None:
        self.setting = setting
        self.lens = (count, keys, new_tokens)
        device = setting.device
        shape = (setting.decode_layers, count * keys, 1, setting.num_kv_heads, setting.head_dim)
        self.k, self.v = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
        heads = setting.num_kv_heads * setting.group_size
        self.q = torch.empty(count * new_tokens, heads, setting.head_dim, dtype=torch.bfloat16, device=device).normal_()

    def times(self) -> dict[str, float]:
        """Device seconds per layer of every baseline that is installed and takes these sizes."""
        # FlashInfer's fa3 is not among them: it compiles for minutes, and sgl_kernel's is the same method.
        makers = {"flashinfer decode": self._flashinfer_decode} if self.lens[2] == 1 else {}
        makers |= {"flashinfer fa2": lambda: self._flashinfer_prefill("fa2"), "fa3": self._fa3}
        found = {}
        for name, make in makers.items():
            try:
                call = make()
                call(0)  # compiles, outside of what is timed
                found[name] = device_seconds(self.setting, call)
            except (ImportError, NotImplementedError, ValueError, RuntimeError) as error:
                print(f"baseline {name} is left out: {str(error)[:200]}", flush=True)
        return found

    def _indptr(self, step: int) -> Tensor:
        return torch.arange(self.lens[0] + 1, dtype=torch.int32) * step

    def _sizes(self) -> tuple[int, int, int, int]:
        setting = self.setting
        return setting.num_kv_heads * setting.group_size, setting.num_kv_heads, setting.head_dim, 1

    def _pages(self) -> tuple[Tensor, Tensor]:
        count, keys, _ = self.lens
        pages = torch.arange(count * keys, dtype=torch.int32, device=self.setting.device)
        return pages, torch.ones(count, dtype=torch.int32)

    def _flashinfer_prefill(self, backend: str) -> Call:
        flashinfer = importlib.import_module("flashinfer")
        _, keys, new = self.lens
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace(), "NHD", backend=backend)
        bounds = (self._indptr(new), self._indptr(keys))
        wrapper.plan(*bounds, *self._pages(), *self._sizes(), **self._options(causal=True))
        return lambda i: wrapper.run(self.q, self._cache(i), return_lse=True)

    def _flashinfer_decode(self) -> Call:
        flashinfer = importlib.import_module("flashinfer")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace(), "NHD", use_tensor_cores=True)
        wrapper.plan(self._indptr(self.lens[1]), *self._pages(), *self._sizes(), **self._options())
        return lambda i: wrapper.run(self.q, self._cache(i), return_lse=True)

    def _fa3(self) -> Call:
        """As SGLang calls it; pages of one token."""
        attend = importlib.import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
        count, keys, new = self.lens
        device = self.setting.device
        fixed = {
            "page_table": torch.arange(count * keys, dtype=torch.int32, device=device).view(count, keys),
            "cache_seqlens": torch.full((count,), keys, dtype=torch.int32, device=device),
            "cu_seqlens_q": self._indptr(new).to(device),
            "max_seqlen_q": new,
            "softmax_scale": self.setting.sm_scale,
            "causal": True,
        }

        def call(i: int) -> object:
            k, v = self._cache(i)
            return attend(q=self.q, k_cache=k, v_cache=v, **fixed)

        return call

    def _cache(self, i: int) -> tuple[Tensor, Tensor]:
        layer = i % self.setting.decode_layers
        return self.k[layer], self.v[layer]

    def _workspace(self) -> Tensor:
        return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.setting.device)

    def _options(self, **more: Any) -> dict[str, Any]:
        dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        return {"sm_scale": self.setting.sm_scale, **dtypes, **more}
