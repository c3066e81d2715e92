"""Attention of new tokens over compressed spans and their own tokens: one compiled call for a layer, on a CPU.

For decode steps, and for prefills of few tokens. A cache row is read as it is stored, once for all requests that share
it; nothing is gathered. ``layout.py`` says what a batch reads, ``call.py`` compiles and runs, ``numba_impl.py`` is what
each thread does, ``openmp.py`` has PyTorch's threads do it. The tests' dense attention is the definition.
"""

from __future__ import annotations

from kvevict_kernels.span_attention.call import SpanAttention, reason_not_to_run
from kvevict_kernels.span_attention.layout import Layout

__all__ = ["Layout", "SpanAttention", "reason_not_to_run"]
