"""Attention of new tokens over compressed spans and their own tokens on a CPU: one call per layer, compiled by numba.

For decode steps and short prefills. Cache rows are read as they are stored, once for all requests that share them;
nothing is gathered. ``layout.py`` lists a batch's inputs, ``call.py`` compiles and runs, ``numba_impl.py`` is the code
of a thread, ``openmp.py`` runs it on PyTorch's threads. ``TorchAttention`` is the reference implementation.
"""

from __future__ import annotations

from kvevict_kernels.span_attention.call import SpanAttention, prepare_on_cpu, reason_not_to_run
from kvevict_kernels.span_attention.layout import Layout

__all__ = ["Layout", "SpanAttention", "prepare_on_cpu", "reason_not_to_run"]
