"""A batch as the compiled call gets it: addresses of its lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvevict_kernels.checks import check_tensor
from kvevict_kernels.row_sizes import WIDTHS
from kvevict_kernels.span_attention import words as w
from kvevict_kernels.span_runs import SpanReaders, SpanRuns

Words = NDArray[np.int64]
_CPU = torch.device("cpu")


class Layout:
    """Lists that stay the same from step to step, while the same requests read the same spans.

    Per request: ``paths``, its spans, each once; ``new_lens``, its new tokens, >= 1; ``first_tokens``, the row of its
    first new token in the forward. ``shape`` of the arenas: [num_layers, num_token_slots, num_kv_heads, head_dim].

    Attributes:
        num_turned: rows of the forward up to the last whose queries are turned, as rows of 4 bits need it; 0: none is.

    Raises:
        ValueError: a span whose runs exceed its rows.
    """

    def __init__(
        self,
        paths: Sequence[Sequence[SpanRuns]],
        new_lens: Sequence[int],
        first_tokens: Sequence[int],
        shape: torch.Size,
        has_windows: bool = False,
    ) -> None:
        self.has_windows = has_windows
        own_tokens = [range(first, first + new) for first, new in zip(first_tokens, new_lens, strict=True)]
        readers = SpanReaders(paths, own_tokens)
        self.spans = readers.spans
        self.num_heads = shape[2]
        self.new_lens = np.asarray(new_lens, np.int64)
        parts = [*readers.rows, *own_tokens]
        self._first_tokens = list(first_tokens)
        self.num_tokens = np.array([len(part) for part in parts], np.int64)
        has_codes = any(span.bits != WIDTHS[0] for span in self.spans)
        self.num_turned = max(own.stop for own in own_tokens) if has_codes else 0
        lens = self._checked_lens(shape)
        self.max_span_partials = int((count_chunks(lens).sum(2).T @ self.num_tokens[: len(self.spans)]).max(initial=0))

        self.suffix_slots = np.zeros(len(paths), np.int64)
        self.suffix_lens = np.zeros(len(paths), np.int64)
        self._lists = {
            w.SPAN_ROWS: _list(span.rows.data_ptr() for span in self.spans),
            w.SPAN_BITS: _list(span.bits for span in self.spans),
            w.SPAN_STARTS: _list(span.starts.data_ptr() for span in self.spans),
            w.SPAN_LENS: _list(span.lens.data_ptr() for span in self.spans),
            w.SPAN_POSITIONS: _list(span.positions.data_ptr() for span in self.spans),
            w.SUFFIX_SLOTS: self.suffix_slots,
            w.SUFFIX_LENS: self.suffix_lens,
            w.PART_TOKENS: _list([0, *self.num_tokens.cumsum()]),
            w.TOKENS: _list(token for part in parts for token in part),
            w.TOKEN_POSITIONS: np.zeros(sum(map(len, parts)) if has_windows else 0, np.int64),
            w.PATHS: _list(readers.path_start),
            w.PATH_SPANS: _list(readers.path_span),
            w.PATH_PLACES: _list(readers.path_place),
            w.UNIT_ROWS: np.zeros(len(parts) * self.num_heads, np.int64),
        }
        self.words = np.zeros(w.NUM_WORDS, np.int64)
        for word, numbers in self._lists.items():
            self.words[word] = numbers.ctypes.data
        self.words[w.NUM_SPANS] = len(self.spans)
        self.words[w.NUM_REQUESTS] = len(paths)
        self.words[w.WRONG_SLOT] = w.NO_SLOT

    def locate(
        self,
        compressed_lens: Sequence[int],
        seq_lens: Sequence[int],
        rows: Tensor,
        req_to_token: Tensor,
        visible: Tensor | None = None,
    ) -> None:
        """Set where the token slots ``[compressed_len, seq_len)`` of each request are, read when the call runs.

        Args:
            compressed_lens: per request, tokens that are compressed into its path.
            seq_lens: per request, tokens including the new ones; at most the length of a row.
            rows: [num_requests], int, rows of ``req_to_token``.
            req_to_token: [num_rows, max_context_len], int32.
            visible: [num_tokens of the forward], int64: bit j is set if the token sees its request's j-th new token, at
                most 64 each; None: it sees those before it.

        Raises:
            ValueError: ``req_to_token`` is not contiguous int32 on the CPU, or a row is outside of it.
        """
        check_tensor("req_to_token", req_to_token, (None, None), torch.int32, _CPU)
        num_rows, row_len = req_to_token.shape
        row_numbers = rows.numpy()
        if row_numbers.min() < 0 or row_numbers.max() >= num_rows:
            raise ValueError(f"rows: expected 0 to {num_rows - 1}, got {row_numbers.tolist()}")
        begins = np.asarray(compressed_lens, np.int64)
        self.words[w.VISIBLE] = 0 if visible is None else visible.data_ptr()
        self._read = req_to_token, visible  # keeps the addresses valid until the next step
        # In place: the call has the addresses of these lists.
        self.suffix_slots[:] = req_to_token.data_ptr() + 4 * (row_numbers.astype(np.int64) * row_len + begins)
        self.suffix_lens[:] = np.asarray(seq_lens, np.int64) - begins
        if self.has_windows:
            tokens = self._lists[w.TOKENS]
            positions = np.zeros(tokens.max() + 1, np.int64)
            for first, new, end in zip(self._first_tokens, self.new_lens, seq_lens, strict=True):
                depths = np.arange(new)
                if visible is not None:
                    depths = np.bitwise_count(visible[first : first + new].numpy().view(np.uint64)).astype(np.int64) - 1
                positions[first : first + new] = end - new + depths
            self._lists[w.TOKEN_POSITIONS][:] = positions[tokens]

    @property
    def max_partials(self) -> int:
        """Maximum number of partial results of a layer, for each q head of a group."""
        return self.max_span_partials + self.num_heads * int(count_chunks(self.suffix_lens) @ self.new_lens)

    def _checked_lens(self, shape: torch.Size) -> NDArray[np.int64]:
        """[num_spans, num_layers, num_kv_heads], run lengths."""
        bounds = (shape[0], shape[2])
        lens = np.zeros((len(self.spans), *bounds), np.int64)
        for i, span in enumerate(self.spans):
            starts, lens[i] = span.starts.numpy(), span.lens.numpy()
            if lens[i].min() < 0 or starts.min() < 0 or (starts + lens[i]).max() > span.rows.numel():
                raise ValueError(f"starts, lens: a run leaves the span's {span.rows.numel()} rows")
        return lens


def count_chunks(lens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Partial results per q row of units with ``lens`` keys, cut as in the compiled call."""
    chunk_lens: Words = np.maximum(w.CHUNK * -(-lens // (w.CHUNK * w.MAX_CHUNKS)), 1)
    counts: Words = -(-lens // chunk_lens)
    return counts


def _list(numbers: object) -> Words:
    return np.array(list(numbers), np.int64)  # type: ignore[call-overload]
