"""Compiles the call, and runs it on a batch."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvevict_kernels import row_codec, row_sizes
from kvevict_kernels.checks import check_tensor
from kvevict_kernels.row_codec import RowCoding, rotation
from kvevict_kernels.span_attention import words as w
from kvevict_kernels.span_attention.layout import Layout
from kvevict_kernels.span_attention.openmp import Call, compiled, torch_team
from kvevict_kernels.span_runs import SpanRuns

KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Kinds of rows in the compiled code."""
_LINE = 64

logger = logging.getLogger(__name__)


def reason_not_to_run(head_dim: int | None = None) -> str | None:
    """Why this machine, or a model with this head_dim (None: any model), cannot use the compiled call; None if it can.

    Does not compile.
    """
    try:
        importlib.import_module("kvevict_kernels.span_attention.numba_impl")
    except ImportError as error:  # not installed, or incompatible with this NumPy
        return f"numba cannot be imported ({error})"
    if torch_team() is None:
        return "this build of PyTorch does not compute on OpenMP threads"
    if head_dim is not None and head_dim % 16:
        return f"the head dimension is {head_dim}, which is no multiple of 16"
    return None


def prepare_on_cpu(module: str, head_dim: int | None = None) -> None:
    """Compile what a module of this package runs on a CPU, or load it: it takes seconds, for which no request may wait.

    ``module``: the one that has the function ``call``, without the package's name. ``head_dim`` as in
    :func:`reason_not_to_run`; nothing is done where there is such a reason.
    """
    if reason_not_to_run(head_dim) is None:
        importlib.import_module(f"kvevict_kernels.{module}").call()


class SpanAttention:
    """Attention over compressed spans and uncompressed token slots of one pair of arenas. Runs one call at a time.

    The first constructor in a process compiles (seconds), or loads the cached compilation, so that no call waits for
    it.

    Args:
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], contiguous, on the CPU.
        v_arena: like ``k_arena``, or the first columns of its rows.
        num_qo_heads: a multiple of the KV heads.
        coding: of the arenas' rows of 4 bits; None: no span has such rows.

    RuntimeError: see :func:`reason_not_to_run`.
    """

    def __init__(self, k_arena: Tensor, v_arena: Tensor, num_qo_heads: int, coding: RowCoding | None = None) -> None:
        num_layers, num_token_slots, num_kv_heads, head_dim = k_arena.shape
        v_head_dim = v_arena.shape[3]
        reason = reason_not_to_run(head_dim) or reason_not_to_run(v_head_dim)
        if reason is not None:
            raise RuntimeError(f"attention cannot be compiled: {reason}")
        self._read = k_arena, v_arena, coding  # keeps the addresses valid
        self._shape, self._v_head_dim = k_arena.shape, v_head_dim
        self._group = num_qo_heads // num_kv_heads
        self._call = call()
        self._zeros = np.zeros(head_dim, np.float32)
        self._sums = _Buffer()
        self._maxima, self._totals, self._scratch = _Buffer(), _Buffer(), _Buffer()
        self._turned, self._offsets = _Buffer(), _Buffer()
        self._constants = {
            w.STAMP: self._call.stamp,
            w.K: k_arena.data_ptr(),
            w.V: v_arena.data_ptr(),
            w.KIND: KINDS[k_arena.dtype],
            w.HEAD_DIM: head_dim,
            w.V_HEAD_DIM: v_head_dim,
            w.NUM_HEADS: num_kv_heads,
            w.GROUP: self._group,
            w.NUM_TOKEN_SLOTS: num_token_slots,
            w.NUM_HEAD_SLOTS: num_layers * num_token_slots * num_kv_heads,
            w.ZEROS: self._zeros.ctypes.data,
        }
        if coding is not None:
            self._constants |= {
                w.K_MEAN: coding.statistics.k_mean.data_ptr(),
                w.K_SCALE: coding.statistics.k_scale.data_ptr(),
                w.V_MEAN: coding.statistics.v_mean.data_ptr(),
                w.V_SCALE: coding.statistics.v_scale.data_ptr(),
                w.K_STEPS: coding.k_steps.data_ptr(),
                w.V_STEPS: coding.v_steps.data_ptr(),
                w.ROTATION: rotation(head_dim, k_arena.device).data_ptr(),
            }

    def lay_out(
        self,
        paths: Sequence[Sequence[SpanRuns]],
        new_lens: Sequence[int],
        first_tokens: Sequence[int],
        *,
        has_windows: bool = False,
    ) -> Layout:
        """Lay out a batch; arguments as for :class:`Layout`. :meth:`prepare` it before every step."""
        layout = Layout(paths, new_lens, first_tokens, self._shape, has_windows)
        for word, number in self._constants.items():
            layout.words[word] = number
        return layout

    def prepare(self, layout: Layout) -> None:
        """Allocate the partial results of a batch whose suffixes are located; valid until the next call."""
        from kvevict_kernels.span_attention.numba_impl import scratch_bytes

        words, head_dim = layout.words, self._shape[3]
        num_partials = layout.max_partials * self._group
        words[w.SUMS] = self._sums.take(4 * self._v_head_dim * num_partials)
        words[w.MAXIMA] = self._maxima.take(4 * num_partials)
        words[w.TOTALS] = self._totals.take(4 * num_partials)
        num_turned = layout.num_turned * self._group * self._shape[2]
        words[w.TURNED] = self._turned.take(4 * head_dim * num_turned) if num_turned else 0
        words[w.OFFSETS] = self._offsets.take(4 * num_turned)
        words[w.SCRATCH_STRIDE] = scratch_bytes(head_dim, int(layout.num_tokens.max()) * self._group)
        self._num_threads = torch.get_num_threads()
        words[w.SCRATCH] = self._scratch.take(self._num_threads * int(words[w.SCRATCH_STRIDE]))

    def run(
        self,
        layout: Layout,
        layer: int,
        q: Tensor,
        sm_scale: float,
        out: Tensor,
        lse: Tensor,
        *,
        window: int = 0,
        sink_logits: Tensor | None = None,
    ) -> None:
        """Attend with the batch prepared last.

        A new token sees its request's spans and the request's own tokens up to itself; in a layer with a window only
        keys less than ``window`` positions before it.

        Args:
            layout: the batch.
            layer: layer index.
            q: [num_tokens, num_qo_heads, head_dim], bfloat16, float16 or float32; tokens may be strided.
            sm_scale: softmax scale.
            out: [num_tokens, num_qo_heads, v_head_dim], dtype of ``q``, contiguous; only rows of the batch's tokens are
                written.
            lse: [num_tokens, num_qo_heads], float32, contiguous; likewise; natural log-sum-exp of the scaled scores.
            window: of the layer, in tokens; 0: none.
            sink_logits: [num_qo_heads], float32, contiguous: one more score of every row, whose value is 0.

        Raises:
            IndexError: a row outside the arena.
            ValueError: sink logits of another shape or dtype.
        """
        if sink_logits is not None:
            check_tensor("sink_logits", sink_logits, (q.shape[1],), torch.float32, q.device)
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        words = layout.words
        words[w.LAYER] = layer
        words[w.Q], words[w.Q_STRIDE], words[w.Q_KIND] = q.data_ptr(), q.stride(0), KINDS[q.dtype]
        words[w.OUT], words[w.LSE] = out.data_ptr(), lse.data_ptr()
        words[w.WINDOW], words[w.SINK_LOGITS] = window, 0 if sink_logits is None else sink_logits.data_ptr()
        words[w.SCALE : w.SCALE + 1].view(np.float32)[0] = sm_scale
        self._call.run(words, self._num_threads)
        if words[w.WRONG_SLOT] != w.NO_SLOT:
            # Reset before it is raised: the layout may be used again.
            slot, words[w.WRONG_SLOT] = int(words[w.WRONG_SLOT]), w.NO_SLOT
            raise IndexError(f"head slot {slot}: the arena has {self._constants[w.NUM_HEAD_SLOTS]}")


class _Buffer:
    """Memory that grows to the largest size requested."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> int:
        """Address of ``num_bytes`` bytes, aligned to a cache line; previous content is lost."""
        # Never smaller again: a server's batches come back to their size, and fresh memory has to be mapped.
        if self._memory.nbytes < num_bytes + _LINE:
            self._memory = np.empty(num_bytes + _LINE, np.uint8)
        return -(-self._memory.ctypes.data // _LINE) * _LINE


@cache
def call() -> Call:
    """The compiled call; compiled the first time, or loaded."""
    from kvevict_kernels.span_attention.numba_impl import compile_call

    started, own = time.monotonic(), sorted(map(str, Path(__file__).parent.glob("*.py")))
    made = compiled("attention", [*own, row_codec.__file__, row_sizes.__file__], compile_call)
    how = "loaded" if made.function.cache_hits else "compiled"
    logger.info("attention %s in %.1f s", how, time.monotonic() - started)
    return made
