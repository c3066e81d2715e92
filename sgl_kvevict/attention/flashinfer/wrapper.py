"""FlashInfer's paged prefill kernel, as this package plans and runs it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.flashinfer.lists import PageLists, build_suffix_lists
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.geometry import KVGeometry

WORKSPACE_BYTES = 256 * 2**20
ROW_BOUNDS = "_paged_kv_indptr_buf"
"""Attribute in which FlashInfer 0.7.2's wrapper keeps the row bounds that its kernel reads."""
MEND = (
    "put nvcc of a CUDA toolkit, a C++ compiler and ninja on PATH, or install flashinfer-jit-cache; "
    "`sgl-kvevict check` shows what is missing"
)


@contextmanager
def compiles_kernels() -> Iterator[None]:
    """Turn FlashInfer's errors of import, compilation and loading into a refusal.

    FlashInfer compiles a kernel when a wrapper is first planned for it.

    Raises:
        UnsupportedSetupError: no nvcc, or a failed build or load (RuntimeError); no ninja (FileNotFoundError); an nvcc
            that fails (CalledProcessError); a cache folder without write access (OSError).
    """
    try:
        yield
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        lines = str(error).splitlines() or [""]
        raise UnsupportedSetupError(
            [f"FlashInfer does not run here: {type(error).__name__}: {lines[0]} ({MEND})"]
        ) from error


class PagedPrefill:
    """One ``BatchPrefillWithPagedKVCacheWrapper`` with pages of one K and V row.

    ``workspace`` is [WORKSPACE_BYTES], uint8, on the device, shared by wrappers on one stream. ``backend`` is
    FlashInfer's name of its kernels: ``fa2``, or ``auto`` (fa3 on Hopper, else fa2). A plan is copied asynchronously to
    the device from a pinned buffer of the wrapper, so the next plan waits until this copy is done.
    """

    def __init__(self, workspace: Tensor, head_dim: int, dtype: torch.dtype, backend: str) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        self._head_dim = head_dim
        self._dtype = dtype
        self._taken = torch.cuda.Event() if workspace.is_cuda else None  # type: ignore[no-untyped-call]

    def plan(self, lists: PageLists, num_qo_heads: int, num_kv_heads: int, **options: Any) -> None:
        """Schedule a batch; compiles the kernel when it is the first of its kind. ``options`` are FlashInfer's."""
        if self._taken is not None:
            self._taken.synchronize()  # returns at once before the first record
        self._wrapper.plan(
            lists.qo_indptr,
            lists.kv_indptr,
            lists.kv_indices,
            # A page is one row, so the last page of each is full.
            torch.ones(lists.qo_indptr.numel() - 1, dtype=torch.int32),
            num_qo_heads,
            num_kv_heads,
            self._head_dim,
            1,
            # Layers may differ in their scale and share a plan; the scale comes with `run`, as that of the keys.
            sm_scale=1.0,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            **options,
        )
        if self._taken is not None:
            self._taken.record()

    def plan_suffixes(self, batch: AttentionBatch, geometry: KVGeometry, window: int = 0) -> None:
        """Schedule causal attention of new tokens to their request's suffix; each sees ``window`` tokens (0: all)."""
        # Causal masks are aligned to the ends: the last new token sees the whole suffix. window_left: tokens before a
        # query, -1: all.
        heads = geometry.num_qo_heads, geometry.num_kv_heads
        self.plan(build_suffix_lists(batch, window), *heads, causal=True, window_left=window - 1)

    def set_row_bounds(self, kv_indptr: Tensor) -> None:
        """Replace the row bounds ([num_rows + 1], int32, on the device) by others that the plan allows.

        FlashInfer's public way exists only in its mode for CUDA graphs, which fixes the number of rows and sizes the
        query tile for the longest possible row.
        """
        setattr(self._wrapper, ROW_BOUNDS, kv_indptr)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, sm_scale: float, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend as planned; return ``out``, and ``lse``, natural: 0 and -inf for a row without pages.

        ``q`` is [num_queries, num_qo_heads, head_dim], contiguous, like ``out`` (None: allocated); ``k`` and ``v`` are
        [num_pages, 1, num_kv_heads, head_dim], with the same strides; ``lse`` is [num_queries, num_qo_heads], float32
        (None: allocated).
        """
        out = torch.empty_like(q) if out is None else out  # FlashInfer would zero its own first
        # Programmatic dependent launch would read row bounds before their copy has ended.
        result: tuple[Tensor, Tensor] = self._wrapper.run(
            q, (k, v), k_scale=sm_scale, out=out, lse=lse, return_lse=True, lse_base="ln", enable_pdl=False
        )
        return result
