"""Which tokens are kept: alike in adjacent layers (ChunkKV, Table 3), and in any head and layer (K-VEC, Table 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policy_bench.prompt import DemoModel
from torch import Tensor

from paper_bench.compressed import Compressible
from paper_bench.nll import PARTS
from paper_bench.results import Results
from paper_bench.texts import Text

SIMILARITY: Mapping[str, tuple[str, dict[str, Any]]] = {
    "random": ("random", {}),
    "h2o": ("h2o", {}),
    "snapkv": ("snapkv", {}),
    "snapkv, no pool": ("snapkv", {"kernel_size": 1}),
    **{f"chunks of {size}": ("chunkkv", {"chunk_length": size}) for size in (3, 5, 10, 20, 30)},
}
COVERAGE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "random": ("random", {}),
    "snapkv": ("snapkv", {}),
    "ada-snapkv": ("ada-snapkv", {}),
    **{name: ("k-vec", options) for name, options in PARTS.items()},
    **{f"{name}, pool of 7": ("k-vec", {**PARTS[name], "kernel_size": 7}) for name in ("neither", "both")},
}
ALIKE = "similarity of adjacent layers"
#: Kept shares: K-VEC's eviction rates are 1 minus these.
KEPT = (0.75, 0.5, 0.25, 0.1)


def measure(demo: DemoModel, texts: list[Text], results: Results, papers: list[str]) -> None:
    """All numbers of all texts that are not there yet."""
    for index, text in enumerate(texts):
        similar = [name for name in SIMILARITY if not results.has("chunkkv", ALIKE, name, index)]
        covering = [name for name in COVERAGE if not results.has("k-vec", covers(KEPT[-1]), name, index)]
        similar, covering = similar if "chunkkv" in papers else [], covering if "k-vec" in papers else []
        if not similar and not covering:
            continue
        compressible = Compressible(demo.prefill(text.prompt))
        for name in similar:
            policy, options = SIMILARITY[name]
            kept = compressible.keep(policy, 0.1, options, sink_tokens=0).mask
            results.add("chunkkv", ALIKE, name, index, adjacent_similarity(kept))
        for name in covering:
            policy, options = COVERAGE[name]
            for share in KEPT:
                kept = compressible.keep(policy, share, options, sink_tokens=0).mask
                results.add("k-vec", covers(share), name, index, float(kept.any(0).any(0).float().mean()))
        results.write()


def covers(share: float) -> str:
    """Name of the measure of coverage at a kept share."""
    return f"coverage, {share:g} kept"


def adjacent_similarity(kept: Tensor) -> float:
    """Mean Jaccard similarity of adjacent layers, of the first head only as in the paper, without the window.

    Args:
        kept: [num_layers, num_kv_heads, num_tokens], bool; the range ends before the window.
    """
    upper, lower = kept[:-1, 0], kept[1:, 0]
    return float(((upper & lower).sum(-1) / (upper | lower).sum(-1)).mean())
