"""ChunkKV: whole chunks of consecutive tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.parts import Scorer
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.presets.budget import BudgetOptions
from sgl_kvevict.policies.presets.entry import PolicyEntry
from sgl_kvevict.policies.scorers import WindowAttentionScorer, WindowLogitsScorer
from sgl_kvevict.policies.selectors import ChunkSelector


@dataclass(frozen=True)
class ChunkKVOptions(BudgetOptions):
    """Options of ``chunkkv``."""

    chunk_length: int = option(10, "tokens in a chunk", minimum=1)
    mode: Literal["exact", "paper"] = option(
        "exact",
        "chunks over competing tokens, the last one cut to fit (exact), or Algorithm 1 as printed (paper), which needs "
        "tail_tokens < window_size",
        choices=("exact", "paper"),
    )
    reuse_layers: int = option(1, "layers that share the positions chosen by the first of them; 1 = off", minimum=1)
    window_size: int = option(32, "queries at the end of the prompt whose attention scores tokens", minimum=1)
    score: Literal["softmax", "raw"] = option(
        "softmax", "attention weights, or raw dot products (as printed)", choices=("softmax", "raw")
    )
    chunk_score: Literal["sum", "mean"] = option(
        "sum", "a chunk's score is the sum or the mean of its tokens'", choices=("sum", "mean")
    )
    share_heads: bool = option(False, "all heads of a layer keep the same chunks, by summed scores (kvpress)")
    keep_window: bool = option(True, "window tokens inside the range are kept without competing")

    def scorer(self) -> Scorer:
        """The scorer these options describe."""
        if self.score == "raw":
            return WindowLogitsScorer(self.window_size, self.keep_window)
        return WindowAttentionScorer(self.window_size, kernel_size=1, keep_window=self.keep_window)


def _chunkkv(options: ChunkKVOptions) -> Policy:
    if options.mode == "paper" and not options.keep_window:
        raise ConfigError(
            "policy_options.mode: got 'paper' for policy 'chunkkv' with keep_window=False; allowed: 'exact', or "
            "keep_window=True (Algorithm 1 always keeps the window)"
        )
    selector = ChunkSelector(options.chunk_length, options.mode, options.chunk_score, options.share_heads)
    return Policy(
        "chunkkv",
        options.scorer(),
        options.allocator(),
        selector,
        reuse_layers=options.reuse_layers,
        max_tail_tokens=options.window_size - 1 if options.mode == "paper" else None,
        why_max_tail=f"mode='paper' lays chunks over the window's window_size={options.window_size} tokens too; a tail "
        "that covers all of them leaves what mode='exact' keeps",
    )


CHUNKKV = PolicyEntry(
    "chunkkv",
    "whole chunks of consecutive tokens, by the attention the last queries pay to them",
    ChunkKVOptions,
    _chunkkv,
)
