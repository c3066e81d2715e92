"""What is compared with what: a kvpress press, our policy, the tokens both decide over, and what to expect.

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
        method: the paper's name of the method.
        press: the peer.
        policy: our policy's name.
        options: its options.
        tail: last tokens of the prompt that are not in the range.
        protected: first tokens that every head keeps.
        coincides: the definitions are the same, so the kept sets must be.
        reason: what makes them the same, or different.
    """

    name: str
    method: str
    press: Press
    policy: str
    options: dict[str, Any]
    tail: int
    coincides: bool
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
        Case("streaming-llm", "StreamingLLM", press, "streaming-llm", {}, 0, True, same),
        Case("streaming-llm, as served", "StreamingLLM", press, "streaming-llm", {}, WINDOW, True, served, SINKS),
    ]


def _snapkv(setting: Setting) -> list[Case]:
    def case(name: str, press: Press, options: dict[str, Any], tail: int, coincides: bool, reason: str) -> Case:
        return Case(name, "SnapKV", press, "snapkv", options, tail, coincides, reason)

    cases = [
        case("snapkv, no pool", _snapkv_press(setting, kernel=1), _window_options(kernel=1), WINDOW, True,
             "mean attention of the window's queries, tail = window"),
        case("snapkv, no pool, window in range", _snapkv_press(setting, kernel=1), _window_options(kernel=1), 0, True,
             "the window lies in the range and is kept without competing"),
        case("snapkv, avg 5", _snapkv_press(setting), _window_options(), WINDOW, True,
             "average pool of 5 with zero padding, tail = window"),
        case("snapkv, avg 5, window in range", _snapkv_press(setting), _window_options(), 0, False,
             "ours pools across the start of the window; kvpress cuts the window off and pads with zeros"),
        case("snapkv, defaults", _snapkv_press(setting), {}, WINDOW, False,
             "our default is Ada-KV's max pool of 7; kvpress averages over 5"),
    ]  # fmt: skip
    if setting.num_kept > 64:
        reason = "kvpress' own defaults: window 64, average pool of 5, tail = window"
        cases.insert(
            3, case("snapkv, avg 5, window 64", _snapkv_press(setting, 64), _window_options(64), 64, True, reason)
        )
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
    plain = Press("PyramidKVPress", {**_snapkv_press(setting).options, "beta": 20})
    options = _window_options()
    return [
        Case("pyramidkv, same line", "PyramidKV", matched, "pyramidkv", {**options, "pyramid_beta": 30}, WINDOW, True,
             "ours lays the line over entries beside the window, kvpress over all entries: its beta is kept / (window "
             "+ (kept - window) / 30) for our 30; the budget needs no rounding"),
        Case("pyramidkv, beta 20", "PyramidKV", plain, "pyramidkv", options, WINDOW, False,
             "beta = 20 is another line; kvpress rounds each layer alone, and uses equal layers if kept / beta is "
             "below the window"),
    ]  # fmt: skip


def _h2o(setting: Setting) -> list[Case]:
    press = Press("ObservedAttentionPress", {"compression_ratio": setting.ratio})

    def case(name: str, options: dict[str, Any], coincides: bool, reason: str) -> Case:
        return Case(name, "H2O", press, "h2o", options, 0, coincides, reason)

    return [
        case("h2o, as ObservedAttention", {"normalize": "queries", "recent_ratio": 0.0}, True,
             "mean attention of the queries that saw the token, no recent share"),
        case("h2o, no recent share", {"recent_ratio": 0.0}, False,
             "H2O sums, ObservedAttention averages, which lifts late tokens"),
        case("h2o, defaults", {}, False,
             "as above; half of the budget is for recent tokens"),
    ]  # fmt: skip


def _chunkkv(setting: Setting) -> list[Case]:
    window = 2 * CHUNK + setting.num_tokens % CHUNK

    def press(window: int) -> Press:
        inner = _snapkv_press(setting, window, kernel=1)
        return Press("ChunkKVPress", {"chunk_length": CHUNK}, inner)

    same = {"window_size": window, "chunk_length": CHUNK, "chunk_score": "mean", "share_heads": True}
    own = {"window_size": window, "chunk_length": CHUNK}

    def case(name: str, press: Press, options: dict[str, Any], tail: int, coincides: bool, reason: str) -> Case:
        return Case(name, "ChunkKV", press, "chunkkv", options, tail, coincides, reason)

    return [
        case("chunkkv, as kvpress", press(window), same, window, True,
             "mean score of a chunk, summed over heads; the window (20 to 29 tokens) begins at a chunk's start; the "
             "budget is whole chunks"),
        case("chunkkv, chunks per head", press(window), own, window, False,
             "chunks per head, as in the paper; kvpress sums over heads"),
        case("chunkkv, defaults", press(WINDOW), {}, WINDOW, False,
             "as above; ours cuts the last chunk to the budget, kvpress keeps whole ones only"),
    ]  # fmt: skip


def _ada_snapkv(setting: Setting) -> list[Case]:
    def press(kernel: int) -> Press:
        return Press("AdaKVPress", {"alpha_safeguard": 0.2}, _snapkv_press(setting, kernel=kernel))

    def case(name: str, press: Press, options: dict[str, Any], tail: int, coincides: bool, reason: str) -> Case:
        return Case(name, "AdaKV", press, "ada-snapkv", options, tail, coincides, reason)

    # kvpress' safeguard counts the window: of int(0.2 * kept) safe entries all but WINDOW are real candidates.
    safe = max(int(setting.num_kept * 0.2) - WINDOW, 0)
    alpha = round((safe + 0.5) / (setting.num_kept - WINDOW), 6) if safe else 0.0
    guard = {"safeguard": "kvpress"}
    return [
        case("ada-snapkv, window in range", press(1), {**_window_options(kernel=1), **guard}, 0, True,
             "each head's best int(0.2 * kept) entries, window included, then one competition"),
        case("ada-snapkv, avg 5", press(5), {**_window_options(), **guard, "alpha": alpha}, WINDOW, True,
             "the same, window behind the range; alpha such that as many entries are safe"),
        case("ada-snapkv, alpha 0.2", press(5), {**_window_options(), **guard}, WINDOW, False,
             "ours protects 20 % beside the window, kvpress 20 % of all, window first"),
        case("ada-snapkv, authors' code", press(5), _window_options(), WINDOW, False,
             "80 % adaptive share (Ada-KV's code) instead of a floor"),
        case("ada-snapkv, paper", press(5), {**_window_options(), "safeguard": "paper"}, WINDOW, False,
             "20 % adaptive share (Algorithm 2) instead of a floor"),
        case("ada-snapkv, defaults", press(5), {}, WINDOW, False,
             "authors' code, and max pool of 7"),
    ]  # fmt: skip


def _agnostic(setting: Setting) -> list[Case]:
    ratio = {"compression_ratio": setting.ratio}
    tail = f"the tail of {WINDOW} is kept within the budget; in kvpress it competes"
    return [
        Case("knorm", "Knorm", Press("KnormPress", ratio), "knorm", {}, 0, True, "smallest key norms"),
        Case("knorm, as served", "Knorm", Press("KnormPress", ratio), "knorm", {}, WINDOW, False,
             f"{tail}, as do {SINKS} sinks", SINKS),
        Case("keydiff", "KeyDiff", Press("KeyDiffPress", ratio), "keydiff", {}, 0, True,
             "least cosine similarity to the mean key direction of the prompt"),
        Case("keydiff, as served", "KeyDiff", Press("KeyDiffPress", ratio), "keydiff", {}, WINDOW, False,
             f"{tail}, as do {SINKS} sinks; our mean is over the range", SINKS),
    ]  # fmt: skip
