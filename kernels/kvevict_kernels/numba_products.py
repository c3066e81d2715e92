"""row_products on a CPU, compiled: each thread takes a part of the tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit
from numba.core import types
from torch import Tensor

from kvevict_kernels.span_attention.call import KINDS
from kvevict_kernels.span_attention.numba_impl import share_of
from kvevict_kernels.span_attention.numba_rows import floats, int64s, item_bytes, load_row
from kvevict_kernels.span_attention.numba_vectors import prefetch
from kvevict_kernels.span_attention.openmp import Call, compiled

STAMP, KIND, NUM_LAYERS, NUM_HEADS, HEAD_DIM, NUM_TOKENS, TABLE_STEP = range(7)
LAYER_STEP, SLOT_STEP, HEAD_STEP = range(7, 10)
ARENA, SLOTS, WEIGHTS, PARTNERS, COS, SIN, PRODUCTS, SQUARES, SCRATCH, NUM_WORDS = range(10, 20)
"""Indices into the list of 64-bit words that the compiled function gets: sizes; strides of the arena, in numbers; and
addresses. ``TABLE_STEP``: numbers from a token's cosines to the next one's; 0 where all have the same."""
AHEAD = 8
"""Tokens between the one that is multiplied and the one that is fetched."""
LINE = 64
_ONE = np.float32(1.0)


# Sums in any order, so that the loop is made of vector instructions.
@njit(fastmath={"reassoc", "contract"})
def _product_and_square(head_dim, row, weights, partners, cos, sin):
    x, w, p, c, s = floats(row), floats(weights), floats(partners), floats(cos), floats(sin)
    product = square = np.float32(0.0)
    for i in range(head_dim):
        product += x[i] * (w[i] * c[i] + p[i] * s[i])
        square += x[i] * x[i]
    return product, square


@njit
def _multiply_share(words, begin, end, scratch):
    """Multiply the tokens ``[begin, end)`` in all layers; ``scratch`` is of one row."""
    kind, num_heads, head_dim, slots = words[KIND], words[NUM_HEADS], words[HEAD_DIM], int64s(words[SLOTS])
    size = item_bytes(kind)
    for layer in range(words[NUM_LAYERS]):
        arena = words[ARENA] + size * layer * words[LAYER_STEP]
        out = layer * words[NUM_TOKENS]
        for i in range(begin, end):
            # Slots of a prompt need not be neighbours: the processor does not foresee the next one.
            ahead = arena + size * slots[min(i + AHEAD, end - 1)] * words[SLOT_STEP]
            for head in range(num_heads):
                for line in range(0, size * head_dim, LINE):
                    prefetch(ahead + size * head * words[HEAD_STEP] + line)
            table = 4 * i * words[TABLE_STEP]
            for head in range(num_heads):
                row = arena + size * (slots[i] * words[SLOT_STEP] + head * words[HEAD_STEP])
                load_row(kind, head_dim, row, scratch, _ONE)
                own, place = 4 * (layer * num_heads + head) * head_dim, (out + i) * num_heads + head
                floats(words[PRODUCTS])[place], floats(words[SQUARES])[place] = _product_and_square(
                    head_dim,
                    scratch,
                    words[WEIGHTS] + own,
                    words[PARTNERS] + own,
                    words[COS] + table,
                    words[SIN] + table,
                )


def _compile(stamp: int, is_cached: bool) -> Any:
    @cfunc(types.void(types.CPointer(types.int64)), cache=is_cached)
    def multiply_rows(address):
        words = carray(address, NUM_WORDS)
        # Never so: as in `span_attention`, the comparison makes the stamp a part of the code.
        if words[STAMP] != stamp:
            return
        thread, begin, end = share_of(words[NUM_TOKENS])
        _multiply_share(words, begin, end, words[SCRATCH] + 4 * thread * words[HEAD_DIM])

    return multiply_rows


@cache
def call() -> Call:
    """The compiled function; compiled at the first call, or loaded."""
    return compiled("scoring", [__file__], _compile)


def multiply(
    arena: Tensor,
    slots: Tensor,
    weights: Tensor,
    partners: Tensor,
    cos: Tensor,
    sin: Tensor,
    products: Tensor,
    squares: Tensor,
) -> None:
    """Write the products, and the sums of the rows' squares, on PyTorch's threads; arguments as in the operation."""
    num_layers, _, num_heads, head_dim = arena.shape
    num_threads = torch.get_num_threads()
    scratch = np.empty(num_threads * head_dim, np.float32)
    table_step = head_dim if cos.shape[0] > 1 else 0
    sizes = KINDS[arena.dtype], num_layers, num_heads, head_dim, slots.numel(), table_step, *arena.stride()[:3]
    tensors = arena, slots, weights, partners, cos, sin, products, squares
    words = np.array([call().stamp, *sizes, *(x.data_ptr() for x in tensors), scratch.ctypes.data], np.int64)
    call().run(words, num_threads)
