from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from helpers.decisions import Decision, decide
from helpers.dense_attention import accumulated_attention, dense_attention
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import LayerView, Policy, QueryWindow, RangeScores, Signal


class Prompt:
    """Keys, values and queries of a small model over a prompt, shown as a server would."""

    def __init__(self, keys: list[Tensor], queries: list[Tensor], *, tail: int, window: int, start: int = 0) -> None:
        """keys[l] [n, H, D]; queries[l] [m, Hq, D] of the last m positions; range [start, n - tail)."""
        self.keys, self.queries = keys, queries
        self.num_layers, self.window = len(keys), window
        self.length, self.num_heads, self.head_dim = keys[0].shape
        self.start, self.end = start, self.length - tail
        generator = torch.Generator().manual_seed(5)
        self.slots = 1 + torch.randperm(self.length, generator=generator)
        self.values = [torch.randn(k.shape, generator=generator) for k in keys]
        self.shown: list[int] = []

    @property
    def geometry(self) -> KVGeometry:
        return KVGeometry(self.num_layers, self.queries[0].shape[1], self.num_heads, self.head_dim, self.length + 1)

    def weights(self, layer: int) -> tuple[Tensor, Tensor]:
        queries = self.queries[layer]
        return dense_attention(
            queries, self.keys[layer], sm_scale=self.head_dim**-0.5, query_start=self.length - queries.shape[0]
        )

    def show(self, layer: int) -> LayerView:
        self.shown.append(layer)
        buffers = torch.full((2, self.length + 1, self.num_heads, self.head_dim), torch.nan)
        buffers[0, self.slots], buffers[1, self.slots] = self.keys[layer], self.values[layer]
        weights, lse = self.weights(layer)
        lse = lse.contiguous()
        queries = self.queries[layer]
        first = max(queries.shape[0] - self.window, 0)
        begin = self.length - queries.shape[0] + first
        attention = accumulated_attention(weights, self.num_heads)[:, self.start : self.end]
        signals: dict[Signal, object] = {
            Signal.ACCUMULATED_ATTENTION: attention,
            Signal.LEARNED_SCORES: attention.clamp(min=1e-9).log(),
        }
        if self.window:
            signals[Signal.WINDOW_QUERIES] = QueryWindow(queries[first:], lse[first:].float(), begin)
            signals[Signal.WINDOW_KEYS] = self.keys[layer][begin:]
        return LayerView(
            layer=layer,
            start=self.start,
            k_buffer=buffers[0],
            v_buffer=buffers[1],
            token_slots=self.slots[self.start : self.end],
            sm_scale=self.head_dim**-0.5,
            signals=signals,
            num_prompt_tokens=self.length,
        )

    def run(self, policy: Policy, total: int, protected: int = 0) -> Decision:
        return decide(policy, self.show, self.geometry, total, protected)


def kept_lists(decision: Decision) -> list[list[list[int]]]:
    """Kept positions per layer and head."""
    selection = decision.selection
    lens = selection.keep_lens.flatten().tolist()
    runs = [run.tolist() for run in selection.indices.split(lens)]
    num_heads = selection.keep_lens.shape[1]
    return [runs[i : i + num_heads] for i in range(0, len(runs), num_heads)]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def random_prompt() -> Callable[..., Prompt]:
    def make(
        seed: int = 0,
        *,
        num_layers: int = 3,
        num_heads: int = 3,
        group: int = 2,
        length: int = 80,
        tail: int = 8,
        window: int = 8,
        num_queries: int | None = None,
        start: int = 0,
    ) -> Prompt:
        generator = torch.Generator().manual_seed(seed)
        num_queries = length if num_queries is None else num_queries
        keys = [2 * torch.randn(length, num_heads, 8, generator=generator) for _ in range(num_layers)]
        queries = [2 * torch.randn(num_queries, num_heads * group, 8, generator=generator) for _ in range(num_layers)]
        return Prompt(keys, queries, tail=tail, window=window, start=start)

    return make


def prompt_from_weights(layers: list[Tensor], *, tail: int, window: int | None = None) -> Prompt:
    """A prompt whose last queries have exactly these attention weights.

    layers[l] [num_heads, num_queries, num_tokens] float64; rows sum to 1; zeros after the query.
    """
    num_heads, num_queries, length = layers[0].shape
    keys = torch.eye(length)[:, None].expand(length, num_heads, length).contiguous()
    queries = [(rows.clamp(min=1e-30).log() * length**0.5).transpose(0, 1).float().contiguous() for rows in layers]
    return Prompt([keys] * len(layers), queries, tail=tail, window=num_queries if window is None else window)


@pytest.fixture
def from_weights() -> Callable[..., Prompt]:
    return prompt_from_weights


@pytest.fixture
def make_prompt() -> type[Prompt]:
    return Prompt


@pytest.fixture
def kept() -> Callable[[Decision], list[list[list[int]]]]:
    return kept_lists


@pytest.fixture
def range_scores() -> Callable[..., RangeScores]:
    """Scores of one or more layers given as numbers, all tokens competing unless pinned."""

    def make(values: object, tie_break: object = None, first: int = 0, last: int = 0) -> RangeScores:
        tensor = torch.as_tensor(values, dtype=torch.float32)
        tensor = tensor if tensor.ndim == 3 else tensor[None]
        ties = None if tie_break is None else torch.as_tensor(tie_break, dtype=torch.float32).view_as(tensor)
        return RangeScores(tensor, ties, None, first, last)

    return make
