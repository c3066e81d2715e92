"""A segment that was published as it was selected, and the fit of it that is under way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_kvevict.compression.attention_products import AttentionProducts
from sgl_kvevict.policies.parts import Fitter
from sgl_kvevict.prefix import Segment, SegmentPacker


class PendingFit:
    """Fits layer by layer, to what the segment keeps then, and gives the segment the results in one piece.

    Meanwhile the segment may be split, squeezed or moved: its entries are told by run and position, never by where
    they lie. What left it is not fitted, and what a later squeeze keeps, keeps its fit.

    Args:
        fitter: of the policy.
        products: what the passes left behind, of the whole range or of more tokens after it.
        values: [num_layers, num_tokens, num_kv_heads, head_dim], in the arena's dtype: of all tokens of the range, from
            before it was compressed. Overwritten.
        start: logical position of the range's first token.

    Attributes:
        num_bytes: memory that it takes.
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
        """All layers are fitted."""
        return self._next_layer == self._values.shape[0]

    def step(self, segment: Segment) -> None:
        """Fit the next layer to the entries that the segment has now."""
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
        """Give a segment its fitted values and biases; between two steps only.

        Args:
            packer: where it is.
            segment: all layers of which are fitted.
            ends: logical positions at which its views end now. In a causal fit, no block is fitted that one of them
                lies inside: who reads only the tokens before it gets nothing of those behind it.
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
        """Layer, place in the range and KV head of each entry of a segment, [num_entries], int64 each."""
        num_heads = segment.geometry.num_kv_heads
        runs = torch.arange(segment.geometry.num_runs, device=segment.indptr.device)
        runs = torch.repeat_interleave(runs, segment.indptr.diff(), output_size=segment.num_entries)
        return runs // num_heads, segment.positions.long() - self._start, runs % num_heads

    def _kept(self, segment: Segment, layer: int) -> Tensor:
        """[num_kv_heads, num_tokens], bool, which tokens of the range a layer of a segment keeps."""
        num_heads, num_tokens = segment.geometry.num_kv_heads, self._end - self._start
        layers, tokens, heads = self._places(segment)
        kept = torch.zeros(num_heads * num_tokens + 1, dtype=torch.bool, device=tokens.device)
        kept.index_fill_(0, torch.where(layers == layer, heads * num_tokens + tokens, num_heads * num_tokens), True)
        return kept[:-1].view(num_heads, num_tokens)


def _without_rest(products: Tensor, num_tokens: int) -> Tensor:
    """Products without tokens of the last block that lie behind the range: they stay uncompressed."""
    block = products.shape[-1]
    rest = products.shape[1] * block - num_tokens
    if rest:
        products[:, -1, block - rest :] = 0.0
        products[:, -1, :, block - rest :] = 0.0
    return products
