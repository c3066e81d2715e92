"""Presses of kvpress that are measured; imported by kvpress' own environment only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kvpress

#: By name: the press that removes a share of the entries, as its documentation makes it.
PRESSES: Mapping[str, Callable[[float], Any]] = {
    "RandomPress": lambda ratio: kvpress.RandomPress(ratio, seed=0),
    "SnapKVPress": kvpress.SnapKVPress,
    "AdaKVPress(SnapKVPress)": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
    "PyramidKVPress": kvpress.PyramidKVPress,
    "ExpectedAttentionPress": lambda ratio: kvpress.ExpectedAttentionPress(ratio),
    "AdaKVPress(ExpectedAttentionPress)": lambda ratio: kvpress.AdaKVPress(
        kvpress.ExpectedAttentionPress(ratio, epsilon=1e-2)
    ),
    "ChunkKVPress(SnapKVPress)": lambda ratio: kvpress.ChunkKVPress(kvpress.SnapKVPress(ratio)),
    "KeyDiffPress": kvpress.KeyDiffPress,
    "KnormPress": kvpress.KnormPress,
    "StreamingLLMPress": kvpress.StreamingLLMPress,
    "CompactorPress": kvpress.CompactorPress,
    "KVzipPress": kvpress.KVzipPress,
}
