"""What a policy may look at: one layer's keys, values, and the signals of the forward pass it asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from kvevict_kernels.stored_rows import gather_rows
from sgl_kvevict.policies.query_moments import QueryMoments


class Signal(Enum):
    """What a scorer needs from the forward pass; the adapter refuses at start-up what it cannot provide."""

    WINDOW_QUERIES = "window_queries"
    """The last ``window_size`` queries of the prompt, after RoPE, with their log-sum-exp."""
    ACCUMULATED_ATTENTION = "accumulated_attention"
    """Per key, the attention of all queries that saw it, summed; mean over the query heads of a group."""
    WINDOW_KEYS = "window_keys"
    """The keys of the tokens whose queries the window holds: a range ends before them."""
    QUERY_MOMENTS = "query_moments"
    """Per query head, mean and covariance of all queries before RoPE: the same size for any length."""
    READER_ATTENTION = "reader_attention"
    """Per key, the root of the summed squares of the attention that its readers' queries paid it, over the query heads
    of a group too; who reads, :class:`Readers` says."""
    ECHO_ATTENTION = "echo_attention"
    """Per key, the largest attention that the prompt's own queries would pay it, moved behind it."""
    LEARNED_SCORES = "learned_scores"
    """Per key, what weights learned from scoring passes expect of it; not there before they are."""
    OUTPUT_GRAM = "output_gram"
    """Per KV head, the product of the output projection with itself: gives norms of values as the layer adds them."""
    KEYS = "keys"
    VALUES = "values"


class Readers(Enum):
    """Whose queries make :attr:`Signal.READER_ATTENTION`. They come after the range, so it is compressed later."""

    REPETITION = "repetition"
    """Extra passes in which the model repeats the prefix."""
    QUESTIONS = "questions"
    """Requests that extend the prefix, as they come; or questions given with the prefix."""


@dataclass(frozen=True)
class QueryWindow:
    """The last queries of a prompt in one layer.

    Attributes:
        queries: [window, num_qo_heads, head_dim], after RoPE.
        lse: [window, num_qo_heads], float32, natural log-sum-exp over all keys each query saw.
        start: logical position of ``queries[0]``.
        keys: [window, num_kv_heads, head_dim], after RoPE, of the same tokens, if the policy needs them.
    """

    queries: Tensor
    lse: Tensor
    start: int
    keys: Tensor | None = None

    @property
    def end(self) -> int:
        """Logical position after the last query."""
        return self.start + self.queries.shape[0]

    def last(self, count: int) -> QueryWindow:
        """The last ``count`` queries (all of them when there are fewer)."""
        skip = max(self.queries.shape[0] - count, 0)
        keys = None if self.keys is None else self.keys[skip:]
        return QueryWindow(self.queries[skip:], self.lse[skip:], self.start + skip, keys)


@dataclass(frozen=True)
class LayerObservation:
    """What one layer shows to a policy about the tokens ``[start, start + num_tokens)`` of a path.

    Attributes:
        layer: layer index.
        start: logical position of the range's first token.
        k_buffer: [num_token_slots, num_kv_heads, head_dim], the layer's keys, after RoPE.
        v_buffer: [num_token_slots, num_kv_heads, head_dim].
        token_slots: [num_tokens], int64, the range's rows in the buffers.
        sm_scale: softmax scale: factor of the products of queries and ``keys``.
        window: the last queries of the prompt, if the policy needs them.
        accumulated: [num_kv_heads, num_tokens], float32, see :attr:`Signal.ACCUMULATED_ATTENTION`.
        moments: see :attr:`Signal.QUERY_MOMENTS`.
        reader_attention: [num_kv_heads, num_tokens], float32, see :attr:`Signal.READER_ATTENTION`.
        echo: [num_kv_heads, num_tokens], float32, see :attr:`Signal.ECHO_ATTENTION`.
        learned: [num_kv_heads, num_tokens], float32, see :attr:`Signal.LEARNED_SCORES`.
        output_gram: [num_kv_heads, head_dim, head_dim], float32, see :attr:`Signal.OUTPUT_GRAM`.
        num_prompt_tokens: logical length of the prompt whose queries were observed; None if unknown.
        k_scale: what a stored 1 of ``k_buffer`` is worth, if it holds float8.
        v_scale: of ``v_buffer``, likewise.
    """

    layer: int
    start: int
    k_buffer: Tensor
    v_buffer: Tensor
    token_slots: Tensor
    sm_scale: float
    window: QueryWindow | None = None
    accumulated: Tensor | None = None
    moments: QueryMoments | None = None
    reader_attention: Tensor | None = None
    echo: Tensor | None = None
    learned: Tensor | None = None
    output_gram: Tensor | None = None
    num_prompt_tokens: int | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def keys(self) -> Tensor:
        """[num_tokens, num_kv_heads, head_dim], copied at each use, so that a pass holds one layer at a time."""
        return gather_rows(self.k_buffer, self.token_slots, self.k_scale)

    @property
    def values(self) -> Tensor:
        """[num_tokens, num_kv_heads, head_dim], copied at each use, so that a pass holds one layer at a time."""
        return gather_rows(self.v_buffer, self.token_slots, self.v_scale)

    @property
    def stored_sm_scale(self) -> float:
        """Factor of the products of queries and rows of ``k_buffer`` as they are stored."""
        return self.sm_scale * self.k_scale

    @property
    def num_tokens(self) -> int:
        """Tokens in the range."""
        return self.token_slots.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the layer."""
        return self.k_buffer.shape[1]

    def require_window(self, who: str) -> QueryWindow:
        """The query window.

        Raises:
            ValueError: the forward pass did not provide it.
        """
        if self.window is None:
            raise ValueError(f"{who} needs the window queries of layer {self.layer}, got none")
        return self.window

    def require_moments(self, who: str) -> QueryMoments:
        """The query moments.

        Raises:
            ValueError: the forward pass did not provide them.
        """
        if self.moments is None:
            raise ValueError(f"{who} needs the query moments of layer {self.layer}, got none")
        return self.moments

    def require_prompt_length(self, who: str) -> int:
        """The logical length of the observed prompt.

        Raises:
            ValueError: it is unknown.
        """
        if self.num_prompt_tokens is None:
            raise ValueError(f"{who} needs the length of the prompt (num_prompt_tokens), got none")
        return self.num_prompt_tokens

    def require_accumulated(self, who: str) -> Tensor:
        """The accumulated attention.

        Raises:
            ValueError: the forward pass did not provide it, or its shape is wrong.
        """
        return self._per_token(self.accumulated, f"{who} needs accumulated attention")

    def require_reader_attention(self, who: str) -> Tensor:
        """What readers attended to.

        Raises:
            ValueError: no reader provided it, or its shape is wrong.
        """
        return self._per_token(self.reader_attention, f"{who} needs reader attention")

    def require_echo(self, who: str) -> Tensor:
        """The echo attention.

        Raises:
            ValueError: the forward pass did not provide it, or its shape is wrong.
        """
        return self._per_token(self.echo, f"{who} needs echo attention")

    def require_output_gram(self, who: str) -> Tensor:
        """The output projection's product with itself.

        Raises:
            ValueError: it is unknown.
        """
        if self.output_gram is None:
            raise ValueError(f"{who} needs the output projection of layer {self.layer} (output_gram), got none")
        return self.output_gram

    def _per_token(self, signal: Tensor | None, need: str) -> Tensor:
        expected = (self.num_kv_heads, self.num_tokens)
        if signal is None or tuple(signal.shape) != expected:
            got = None if signal is None else tuple(signal.shape)
            raise ValueError(f"{need} {expected} of layer {self.layer}, got {got}")
        return signal
