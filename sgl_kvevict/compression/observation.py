"""What a prefill leaves behind for the policy: a few numbers per token, never attention rows."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kvevict.policies.observation import QueryWindow


class PromptObservation:
    """The last queries of one prompt, layer by layer, gathered while its prefill runs (over any number of chunks).

    The window's queries are kept instead of its scores: they are a constant few rows per layer, they can still be
    scored when the range to compress is known (it may have shrunk since, or may be compressed much later), and the
    log-sum-exp that the forward computed anyway makes the scores true attention weights in one pass over the keys.

    Args:
        num_layers: layers of the model (of this rank).
        window_size: queries to keep, at most.

    Attributes:
        end: logical position after the last query seen.
        is_complete: the whole prompt was seen.
    """

    def __init__(self, num_layers: int, window_size: int) -> None:
        self.window_size = window_size
        self.end = 0
        self.is_complete = False
        self._queries: list[Tensor | None] = [None] * num_layers
        self._lse: list[Tensor | None] = [None] * num_layers
        self._sm_scales = [0.0] * num_layers

    def begin_chunk(self, start: int, end: int, *, is_last: bool) -> None:
        """Announce that queries ``[start, end)`` follow, for every layer.

        Args:
            start: logical position of the chunk's first token; not where the last chunk ended: start afresh.
            end: logical position after the chunk's last token.
            is_last: the prompt ends here.
        """
        if start != self.end:
            self._queries = [None] * len(self._queries)
            self._lse = [None] * len(self._lse)
        self.end = end
        self.is_complete = is_last

    def record(self, layer: int, queries: Tensor, lse: Tensor, sm_scale: float) -> None:
        """Keep the chunk's last queries of one layer.

        Args:
            layer: layer index.
            queries: [num_tokens, num_qo_heads, head_dim], after RoPE; copied.
            lse: [num_tokens, num_qo_heads], float32, natural log-sum-exp over all keys each query saw; copied.
            sm_scale: softmax scale of the layer.
        """
        self._sm_scales[layer] = sm_scale
        self._queries[layer] = self._last(self._queries[layer], queries)
        self._lse[layer] = self._last(self._lse[layer], lse)

    def window(self, layer: int) -> QueryWindow | None:
        """Return the window's queries of one layer, or None if none were recorded (the policy needs none)."""
        queries, lse = self._queries[layer], self._lse[layer]
        if queries is None or lse is None:
            return None
        return QueryWindow(queries=queries, lse=lse, start=self.end - queries.shape[0])

    def sm_scale(self, layer: int) -> float:
        """Return the softmax scale that a layer was recorded with."""
        return self._sm_scales[layer]

    def _last(self, earlier: Tensor | None, rows: Tensor) -> Tensor:
        missing = self.window_size - rows.shape[0]
        if earlier is None or missing <= 0:
            return rows[-self.window_size :].clone()
        return torch.cat([earlier[-missing:], rows])
