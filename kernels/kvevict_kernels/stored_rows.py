"""Reading KV cache rows, in any stored dtype: copies of them, and products with weights of many layers at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvevict_kernels.checks import FP8, KV_DTYPES, check_index_range, check_tensor
from kvevict_kernels.rotary import Turn
from kvevict_kernels.span_attention import reason_not_to_run
from kvevict_kernels.span_attention.call import KINDS
from kvevict_kernels.transfer import to_device

WORD = torch.complex128
"""torch's dtype of 16 bytes; it is copied bit for bit."""
_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Numbers per block of torch's path: fits a core's caches; occupies a GPU."""


def gather_rows(buffer: Tensor, slots: Tensor, scale: float | Tensor = 1.0, dim: int = 0) -> Tensor:
    """Copy the rows at ``slots`` ([n], int, indices along ``dim``) of a KV buffer of any shape.

    ``scale`` is the FP8 scale, not read for other dtypes; a tensor must broadcast against the result. float8 rows are
    returned as float32, since torch has no float8 products, sums or norms; other rows are returned as stored.
    """
    if buffer.dtype != FP8:
        return torch.index_select(buffer, dim, slots)
    rows = torch.index_select(as_moved(buffer), dim, slots)
    return rows.view(FP8).float().mul_(scale)


def as_moved(rows: Tensor) -> Tensor:
    """View rows in a dtype that torch can gather and write: float8 as bytes, others unchanged."""
    return rows.view(torch.uint8) if rows.dtype == FP8 else rows


def as_words(rows: Tensor) -> Tensor:
    """View rows as words of 16 bytes, with which torch gathers fastest; like :func:`as_moved` where they do not fit."""
    ratio = WORD.itemsize // rows.element_size()
    *strides, last = rows.stride()
    starts = (rows.shape[-1], rows.storage_offset(), *strides)
    fits = last == 1 and rows.numel() > 0 and all(start % ratio == 0 for start in starts)
    return rows.view(WORD) if fits else as_moved(rows)


def row_products(
    arena: Tensor, token_slots: Tensor, weights: Tensor, turn: Turn | None = None, scales: Sequence[float] = ()
) -> tuple[Tensor, Tensor]:
    """Multiply each row by its head's weights, which are rotated to the row's position.

    A product with rotated weights is that of the row rotated back with the weights as they are.

    Args:
        arena: [num_layers, num_token_slots, num_kv_heads, head_dim], bfloat16, float16, float32 or float8_e4m3fn; the
            columns of a row are contiguous.
        token_slots: [n], int64.
        weights: [num_layers, num_kv_heads, head_dim], float32.
        turn: from :meth:`Rotary.turn_of`, to the position of each token; None: weights are not rotated.
        scales: of each layer, by which float8 rows are multiplied.

    Returns:
        The products and the rows' Euclidean norms, [num_layers, n, num_kv_heads], float32: tokens before heads, as in
        the pool.

    Raises:
        ValueError: wrong shape, dtype or device; on the CPU also a token slot outside the arena.

    Cost: about ten operations per number, of which none is written; torch's path, on a device, copies blocks as
        float32. No host sync.
    """
    num_layers, num_slots, num_heads, head_dim = arena.shape
    if arena.dtype not in (*KV_DTYPES, FP8) or arena.stride(-1) != 1:
        raise ValueError(f"arena: expected contiguous rows of 8, 16 or 32 bits, got {arena.dtype}, {arena.stride()}")
    check_tensor("token_slots", token_slots, (None,), torch.int64, arena.device)
    check_tensor("weights", weights, (num_layers, num_heads, head_dim), torch.float32, arena.device)
    check_index_range("token_slots", token_slots, num_slots)
    if turn is None:
        turn = Turn.none(head_dim, arena.device)
    num_turns = 1 if turn.cos.shape[0] == 1 else token_slots.numel()
    for name, table in (("cos", turn.cos), ("sin", turn.sin)):
        check_tensor(f"turn.{name}", table, (num_turns, head_dim), torch.float32, arena.device)
    shape = num_layers, token_slots.numel(), num_heads
    products, norms = (torch.empty(shape, device=arena.device) for _ in range(2))
    if arena.device.type == "cpu" and arena.dtype in KINDS and reason_not_to_run(head_dim) is None:
        from kvevict_kernels.numba_products import multiply

        partners = turn.partners(weights).contiguous()
        # Squares of the norms first, to where these will be.
        multiply(arena, token_slots, weights, partners, turn.cos, turn.sin, products, norms)
        return products, norms.sqrt_()
    for layers, part in _blocks(arena, token_slots.numel()):
        scale: Tensor | float = 1.0
        if scales:
            scale = to_device(torch.tensor(scales[layers]), arena.device).view(-1, 1, 1, 1)
        rows = gather_rows(arena[layers], token_slots[part], scale, dim=1).float()
        torch.linalg.vector_norm(rows, dim=-1, out=norms[layers, part])
        # In place: the rows are a copy.
        torch.sum(rows.mul_(turn.cut(part).apply(weights[layers, None])), dim=-1, out=products[layers, part])
    return products, norms


def _blocks(arena: Tensor, num_tokens: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of layers and tokens that torch multiplies at once."""
    num_layers, _, num_heads, head_dim = arena.shape
    room = _BLOCK_ELEMENTS[arena.device.type] // (num_heads * head_dim)
    step = max(min(room, num_tokens), 1)
    group = max(min(room // step, num_layers), 1)
    for layer in range(0, num_layers, group):
        for first in range(0, num_tokens, step):
            yield slice(layer, min(layer + group, num_layers)), slice(first, min(first + step, num_tokens))
