"""Fits of published segments: sums collected by scoring passes, and the fit itself, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvevict_kernels.stored_rows import gather_rows
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.parts import Fitter
from sgl_kvevict.prefix import Segment, SegmentPacker

QUERY_STEP = 2
"""Every second query of a pass is used: half of the work, and still more queries than tokens."""
WEIGHTS_PER_TILE = {"cpu": 2**20, "cuda": 2**26}
"""Attention weights per tile, 4 bytes each: fits a CPU's caches; few launches on a GPU."""


class AttentionProducts:
    """Products of the attention to any two tokens of a block, summed over queries: ``P'P`` of the fit.

    The range is ``num_tokens`` >= 1 from the logical position ``start``; its last block may be shorter.
    ``num_bytes`` includes the copy of the range's values (``value_bytes`` per element) that the fit needs.
    """

    def __init__(self, geometry: KVGeometry, start: int, num_tokens: int, block: int, value_bytes: int) -> None:
        self.start = start
        self.num_tokens = num_tokens
        self.block = block
        self._geometry = geometry
        self._num_blocks = -(-num_tokens // block)
        self._layers: list[Tensor | None] = [None] * geometry.num_layers
        products = 4 * self._num_blocks * block * block
        self.num_bytes = geometry.num_runs * (products + value_bytes * geometry.head_dim * num_tokens)

    def add(
        self, layer: int, queries: Tensor, lse: Tensor, k_buffer: Tensor, token_slots: Tensor, sm_scale: float
    ) -> None:
        """Add one layer's queries of tokens after the range; see :meth:`PromptObservation.record`.

        ``token_slots`` is [num_tokens], int64, slots of the range.
        """
        heads, block = self._geometry.num_kv_heads, self.block
        sums = self._layers[layer]
        if sums is None:
            shape = (heads, self._num_blocks, block, block)
            sums = self._layers[layer] = torch.zeros(shape, device=queries.device)
        rows = _by_head(queries[::QUERY_STEP].float(), heads).transpose(1, 2)  # [heads, head_dim, n * group]
        totals = _by_head(lse[::QUERY_STEP, :, None], heads).transpose(1, 2) * -math.log2(math.e)
        at_once = max(WEIGHTS_PER_TILE[queries.device.type] // (heads * rows.shape[2] * block), 1)
        for first in range(0, self._num_blocks, at_once):
            last = min(first + at_once, self._num_blocks)
            slots = token_slots[first * block : last * block]
            keys = gather_rows(k_buffer, slots).float().transpose(0, 1)
            paid = torch.baddbmm(totals, keys, rows, alpha=sm_scale * math.log2(math.e)).exp2_()
            paid = pad(paid, (0, 0, 0, (last - first) * block - slots.numel()))
            paid = paid.view(heads * (last - first), block, -1)
            products = torch.bmm(paid, paid.transpose(1, 2))
            sums[:, first:last] += products.view(heads, last - first, block, block)

    def take(self, layer: int) -> Tensor | None:
        """Remove and return a layer's [num_kv_heads, num_blocks, block, block], float32; None if no query was added."""
        taken, self._layers[layer] = self._layers[layer], None
        return taken


def _by_head(rows: Tensor, num_kv_heads: int) -> Tensor:
    """[num_kv_heads, n * group_size, width] from [n, num_qo_heads, width]."""
    num_queries, num_qo_heads, width = rows.shape
    grouped = rows.reshape(num_queries, num_kv_heads, num_qo_heads // num_kv_heads, width)
    return grouped.transpose(0, 1).reshape(num_kv_heads, -1, width)


class PendingFit:
    """The fit of a published segment: computed layer by layer, applied to the segment at once.

    Meanwhile the segment may be split, squeezed or moved: entries are identified by run and position, and entries that
    were evicted are skipped.

    ``products`` are of the range, or of the range and more tokens after it. ``values``, [num_layers, num_tokens,
    num_kv_heads, head_dim], in the arena's dtype, are those of all tokens of the range before its compression; they are
    overwritten. ``start`` is the logical position of the range's first token.
    """

    def __init__(self, fitter: Fitter, products: AttentionProducts, values: Tensor, start: int) -> None:
        num_layers, num_tokens, num_heads, _ = values.shape
        self._fitter = fitter
        self._products = products
        self._values = values
        self._start = start
        self._end = start + num_tokens
        self._biases = torch.zeros(num_layers, num_tokens, num_heads, device=values.device)
        self._is_fitted = torch.zeros_like(self._biases, dtype=torch.bool)
        self._next_layer = 0
        self.num_bytes = products.num_bytes + self._biases.nbytes + self._is_fitted.nbytes

    @property
    def is_done(self) -> bool:
        """Whether all layers are fitted."""
        return self._next_layer == self._values.shape[0]

    def step(self, segment: Segment) -> None:
        """Fit the next layer with the segment's current entries."""
        layer, self._next_layer = self._next_layer, self._next_layer + 1
        products = self._products.take(layer)
        if products is None:
            return
        num_tokens = self._end - self._start
        kept = self._kept(segment, layer)
        values = self._values[layer].transpose(0, 1)
        inside = -(-num_tokens // self._products.block)
        fitted = self._fitter.fit(_without_rest(products[:, :inside], num_tokens), values.float(), kept)
        new = torch.where(fitted.is_fitted[..., None], fitted.values.to(values.dtype), values)
        self._values[layer] = new.transpose(0, 1)
        self._biases[layer] = fitted.biases.T
        self._is_fitted[layer] = fitted.is_fitted.T

    def apply(self, packer: SegmentPacker, segment: Segment, ends: Sequence[int]) -> None:
        """Write the fitted values and biases of all layers to a segment, between two steps.

        ``ends`` are the logical positions at which its views end now. In a causal fit, a block with an end inside it
        stays unfitted, so that a request that reads up to the end gets nothing of later tokens.
        """
        layers, tokens, heads = self._places(segment)
        entries = self._is_fitted[layers, tokens, heads]
        if self._fitter.is_causal:
            block = self._products.block
            of_entry = tokens // block
            for end in ends:
                cut = end - self._start
                if 0 < cut < self._end - self._start and cut % block:
                    entries = entries & (of_entry != cut // block)
        packer.fit(segment, entries, self._values[layers, tokens, heads], self._biases[layers, tokens, heads])

    def _places(self, segment: Segment) -> tuple[Tensor, Tensor, Tensor]:
        """Layer, token index in the range and KV head of each entry, [num_entries], int64 each."""
        num_heads = segment.geometry.num_kv_heads
        runs = segment.run_of_entries()
        return runs // num_heads, segment.positions.long() - self._start, runs % num_heads

    def _kept(self, segment: Segment, layer: int) -> Tensor:
        """[num_kv_heads, num_tokens], bool: tokens of the range that one layer of the segment keeps."""
        num_heads, num_tokens = segment.geometry.num_kv_heads, self._end - self._start
        layers, tokens, heads = self._places(segment)
        kept = torch.zeros(num_heads * num_tokens + 1, dtype=torch.bool, device=tokens.device)
        kept.index_fill_(0, torch.where(layers == layer, heads * num_tokens + tokens, num_heads * num_tokens), True)
        return kept[:-1].view(num_heads, num_tokens)


def _without_rest(products: Tensor, num_tokens: int) -> Tensor:
    """Set products of the last block's tokens after the range to 0; they stay uncompressed."""
    block = products.shape[-1]
    rest = products.shape[1] * block - num_tokens
    if rest:
        products[:, -1, block - rest :] = 0.0
        products[:, -1, :, block - rest :] = 0.0
    return products
