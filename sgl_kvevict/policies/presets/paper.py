"""What ``NAME@paper`` sets: options and sizes as a method's paper prints them, with the place where it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PaperValue:
    """One value that a paper prints.

    Attributes:
        name: of the option, or of the field of ``KVEvictConfig``.
        value: what it is set to.
        source: section, equation or algorithm.
    """

    name: str
    value: Any
    source: str


@dataclass(frozen=True)
class PaperSettings:
    """A method as its paper prints it.

    Attributes:
        paper: which one.
        options: of the policy; an option that is given beside ``@paper`` wins.
        kept_window: option that says how many last tokens the paper keeps uncompressed: the server's tail. None: the
            paper decides over the whole prompt, so the tail is a single token.
        why_tail: where the paper says so.
    """

    paper: str
    options: tuple[PaperValue, ...]
    kept_window: str | None
    why_tail: str

    def fields(self, options: Mapping[str, Any]) -> tuple[PaperValue, ...]:
        """Fields of ``KVEvictConfig``, with the options that are in force."""
        tail = 1 if self.kept_window is None else options[self.kept_window]
        return (
            PaperValue("tail_tokens", tail, self.why_tail),
            PaperValue("budget_includes_tail", True, "the budget counts every stored entry, those of the window too"),
            PaperValue("sink_tokens", 0, "no token is kept but by the method itself"),
        )


_ADA_KV = "Ada-KV (arXiv 2407.11550)"
_WINDOW_OPTIONS = (
    PaperValue("window_size", 32, "experiments, settings"),
    PaperValue("kernel_size", 7, "experiments, settings"),
    PaperValue("pooling", "max", "experiments, settings"),
    PaperValue("order", "pool-mean", "Alg. 2, lines 3-4"),
    PaperValue("keep_window", True, "Alg. 2, line 11"),
)
_SAFEGUARD = (
    PaperValue("safeguard", "paper", "Alg. 2, line 8"),
    PaperValue("alpha", 0.2, "experiments, settings"),
)
_WINDOW_TAIL = "Alg. 2, lines 6 and 11: the window is stored besides"
_WHOLE_PROMPT = "the method decides over all tokens of the prompt"

PAPER: Mapping[str, PaperSettings] = {
    "streaming-llm": PaperSettings(
        "StreamingLLM (arXiv 2309.17453)",
        (PaperValue("num_sink_tokens", 4, "Sec. 3"),),
        None,
        _WHOLE_PROMPT,
    ),
    "h2o": PaperSettings(
        "H2O (arXiv 2306.14048)",
        (
            PaperValue("recent_ratio", 0.5, "as many recent tokens as heavy hitters: the released code's examples"),
            PaperValue("normalize", "none", "Sec. 4, Alg. 1"),
        ),
        None,
        _WHOLE_PROMPT,
    ),
    "snapkv": PaperSettings(f"SnapKV as run in {_ADA_KV}", _WINDOW_OPTIONS, "window_size", _WINDOW_TAIL),
    "pyramidkv": PaperSettings(f"PyramidKV as run in {_ADA_KV}", _WINDOW_OPTIONS, "window_size", _WINDOW_TAIL),
    "ada-snapkv": PaperSettings(_ADA_KV, (*_WINDOW_OPTIONS, *_SAFEGUARD), "window_size", _WINDOW_TAIL),
    "ada-pyramidkv": PaperSettings(_ADA_KV, (*_WINDOW_OPTIONS, *_SAFEGUARD), "window_size", _WINDOW_TAIL),
    "chunkkv": PaperSettings(
        "ChunkKV (arXiv 2502.00299)",
        (
            PaperValue("chunk_length", 10, "experiments: 10 for all models"),
            PaperValue("mode", "paper", "Alg. 1, lines 2-8"),
            PaperValue("window_size", 32, "the largest of {4, 8, 16, 32}; which one was used is not said"),
            PaperValue("score", "softmax", "text on Alg. 1: as H2O and SnapKV; line 1 alone would be raw"),
            PaperValue("chunk_score", "sum", "Alg. 1, line 3"),
            PaperValue("share_heads", False, "Alg. 1, for one head"),
        ),
        None,
        "Alg. 1, line 2: chunks lie over the window's tokens too",
    ),
    "d2o": PaperSettings(
        "D2O (arXiv 2406.13035)",
        (
            PaperValue("num_sink_tokens", 4, "Eq. 7, 8 (T; its value is not said, 4 in the released code)"),
            PaperValue("recent_ratio", 0.25, "experiments: N:M = 3:1"),
            PaperValue("direction", "any", "Eq. 9"),
            PaperValue("beta", 0.7, "Eq. 10; experiments"),
            PaperValue("threshold", "ema", "Eq. 10"),
            PaperValue("weighting", "similarity", "Eq. 11, 12"),
            PaperValue("match_on", "keys", "Eq. 9"),
            PaperValue("variance_norm", "none", "Eq. 4, 5"),
            PaperValue("density_rule", "softmax", "Eq. 5"),
        ),
        None,
        _WHOLE_PROMPT,
    ),
    "k-vec": PaperSettings(
        "K-VEC (arXiv 2606.29563)",
        (
            PaperValue("base_window", 16, "Eq. 8 (O)"),
            PaperValue("extended_window", 32, "Eq. 11 (O'); experiments"),
            PaperValue("rescored_share", 0.375, "Eq. 10: delta = 3 of 8 KV heads"),
            PaperValue("bonus", 1.0, "Eq. 15 (lambda); experiments"),
            PaperValue("protected_share", 0.25, "Eq. 16 (beta); experiments"),
            PaperValue("kernel_size", 7, "experiments: all other details as in SnapKV"),
            PaperValue("keep_window", True, "experiments: all other details as in SnapKV"),
        ),
        "base_window",
        "experiments: all other details as in SnapKV, which stores its window besides",
    ),
}
"""By policy."""
