"""What is compared with what: a kvpress press, our policy, the tokens both decide over; the definitions coincide.

Imported by two environments (kvpress' and ours), so it imports neither kvpress nor torch.

Both sides spend the same number of entries on the same prompt. kvpress takes its window's tokens out of the
budget; ours either does so too (``tail=0``: the range is the whole prompt and the policy keeps the window that lies
in it), or the last ``tail`` tokens are the uncompressed tail behind the range, as in the server, and their entries
are taken off the budget before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

KEPT_SHARES = (0.5, 0.2)
WINDOW = 32
SINKS = 4
CHUNK = 10
OWN_POLICIES = ("knorm", "keydiff")
"""Policies of ``examples/policies``."""


@dataclass(frozen=True)
class Press:
    """A press as kvpress users make it: class name, keyword arguments, wrapped press."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    inner: Press | None = None

    @property
    def needs_eager(self) -> bool:
        """ObservedAttention reads the attention weights of the forward pass; the others refuse or ignore them."""
        return self.name == "ObservedAttentionPress"


@dataclass(frozen=True)
class Case:
    """One comparison on one prompt at one budget.

    Attributes:
        name: unique.
        press: the peer.
        policy: our policy's name.
        options: its options.
        tail: last tokens of the prompt that are not in the range.
        protected: first tokens that every head keeps.
        reason: what makes them the same.
    """

    name: str
    press: Press
    policy: str
    options: dict[str, Any]
    tail: int
    reason: str
    protected: int = 0

    @property
    def served(self) -> str:
        """The policy as a server is told to use it: by name, or by dotted path."""
        module = self.policy.replace("-", "_")
        return f"{module}:{module}" if self.policy in OWN_POLICIES else self.policy


@dataclass(frozen=True)
class Setting:
    """A prompt's length and the share to keep, and what follows from them in kvpress' arithmetic."""

    num_tokens: int
    kept_share: float

    @property
    def ratio(self) -> float:
        """kvpress' compression ratio: the share removed."""
        return round(1 - self.kept_share, 6)

    @property
    def num_kept(self) -> int:
        """Tokens that a press keeps per head."""
        return int(self.num_tokens * (1 - self.ratio))


def make_cases(num_tokens: int, kept_share: float) -> list[Case]:
    """All comparisons for a prompt of ``num_tokens`` tokens."""
    setting = Setting(num_tokens, kept_share)
    families: tuple[Callable[[Setting], list[Case]], ...] = (
        _streaming_llm,
        _snapkv,
        _pyramidkv,
        _h2o,
        _chunkkv,
        _ada_snapkv,
        _agnostic,
    )
    return [case for family in families for case in family(setting)]


def _snapkv_press(setting: Setting, window: int = WINDOW, kernel: int = 5) -> Press:
    return Press("SnapKVPress", {"compression_ratio": setting.ratio, "window_size": window, "kernel_size": kernel})


def _window_options(window: int = WINDOW, kernel: int = 5) -> dict[str, Any]:
    return {"window_size": window, "kernel_size": kernel, "pooling": "avg"}


def _streaming_llm(setting: Setting) -> list[Case]:
    press = Press("StreamingLLMPress", {"compression_ratio": setting.ratio, "n_sink": SINKS})
    same = "4 sinks and the most recent tokens"
    served = f"{same}, the tail of {WINDOW} among them"
    return [
        Case("streaming-llm", press, "streaming-llm", {}, 0, same),
        Case("streaming-llm, as served", press, "streaming-llm", {}, WINDOW, served, SINKS),
    ]


def _snapkv(setting: Setting) -> list[Case]:
    def case(name: str, kernel: int, tail: int, reason: str, window: int = WINDOW) -> Case:
        press = _snapkv_press(setting, window, kernel)
        return Case(name, press, "snapkv", _window_options(window, kernel), tail, reason)

    cases = [
        case("snapkv, no pool", 1, WINDOW, "mean attention of the window's queries, tail = window"),
        case("snapkv, no pool, window in range", 1, 0, "the window lies in the range and is kept without competing"),
        case("snapkv, avg 5", 5, WINDOW, "average pool of 5 with zero padding, tail = window"),
    ]
    if setting.num_kept > 64:
        reason = "kvpress' own defaults: window 64, average pool of 5, tail = window"
        cases.append(case("snapkv, avg 5, window 64", 5, 64, reason, 64))
    return cases


def _pyramidkv(setting: Setting) -> list[Case]:
    net = (setting.num_kept - WINDOW) // 30 * 30
    low = net // 30
    gross = net + WINDOW
    matched = Press(
        "PyramidKVPress",
        {
            "compression_ratio": 1 - gross / setting.num_tokens,
            "window_size": WINDOW,
            "kernel_size": 5,
            "beta": gross / (WINDOW + low),
        },
    )
    reason = (
        "ours lays the line over entries beside the window, kvpress over all entries: its beta is kept / (window "
        "+ (kept - window) / 30) for our 30; the budget needs no rounding"
    )
    options = {**_window_options(), "pyramid_beta": 30}
    return [Case("pyramidkv, same line", matched, "pyramidkv", options, WINDOW, reason)]


def _h2o(setting: Setting) -> list[Case]:
    press = Press("ObservedAttentionPress", {"compression_ratio": setting.ratio})
    options = {"normalize": "queries", "recent_ratio": 0.0}
    reason = "mean attention of the queries that saw the token, no recent share"
    return [Case("h2o, as ObservedAttention", press, "h2o", options, 0, reason)]


def _chunkkv(setting: Setting) -> list[Case]:
    window = 2 * CHUNK + setting.num_tokens % CHUNK
    press = Press("ChunkKVPress", {"chunk_length": CHUNK}, _snapkv_press(setting, window, kernel=1))
    options = {"window_size": window, "chunk_length": CHUNK, "chunk_score": "mean", "share_heads": True}
    reason = (
        "mean score of a chunk, summed over heads; the window (20 to 29 tokens) begins at a chunk's start; the "
        "budget is whole chunks"
    )
    return [Case("chunkkv, as kvpress", press, "chunkkv", options, window, reason)]


def _ada_snapkv(setting: Setting) -> list[Case]:
    def case(name: str, kernel: int, options: dict[str, Any], tail: int, reason: str) -> Case:
        press = Press("AdaKVPress", {"alpha_safeguard": 0.2}, _snapkv_press(setting, kernel=kernel))
        options = {**_window_options(kernel=kernel), "safeguard": "kvpress", **options}
        return Case(name, press, "ada-snapkv", options, tail, reason)

    # kvpress' safeguard counts the window: of int(0.2 * kept) safe entries all but WINDOW are real candidates.
    safe = max(int(setting.num_kept * 0.2) - WINDOW, 0)
    alpha = round((safe + 0.5) / (setting.num_kept - WINDOW), 6) if safe else 0.0
    whole = "each head's best int(0.2 * kept) entries, window included, then one competition"
    behind = "the same, window behind the range; alpha such that as many entries are safe"
    return [
        case("ada-snapkv, window in range", 1, {}, 0, whole),
        case("ada-snapkv, avg 5", 5, {"alpha": alpha}, WINDOW, behind),
    ]


def _agnostic(setting: Setting) -> list[Case]:
    ratio = {"compression_ratio": setting.ratio}
    direction = "least cosine similarity to the mean key direction of the prompt"
    return [
        Case("knorm", Press("KnormPress", ratio), "knorm", {}, 0, "smallest key norms"),
        Case("keydiff", Press("KeyDiffPress", ratio), "keydiff", {}, 0, direction),
    ]
