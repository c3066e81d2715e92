"""Continued text: negative log-likelihood after a prompt was compressed in one way or another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policy_bench.prompt import DemoModel

from paper_bench.compressed import Compressible, ContinuingModel
from paper_bench.results import Results
from paper_bench.texts import Text

Case = tuple[str, float, dict[str, Any]]
FULL: Case = ("snapkv", 1.0, {})
#: D2O's ablations at a budget of 0.2 (its Tables 4 and 6-9), and H2O.
D2O: Mapping[str, Case] = {
    "full cache": FULL,
    "random": ("random", 0.2, {}),
    "h2o": ("h2o", 0.2, {}),
    "h2o, N:M = 3:1": ("h2o", 0.2, {"recent_ratio": 0.25}),
    "d2o": ("d2o", 0.2, {}),
    "d2o, any direction": ("d2o", 0.2, {"direction": "any"}),
    "d2o, uniform layers": ("d2o", 0.2, {"budget_rule": "uniform"}),
    "d2o, all merged": ("d2o", 0.2, {"threshold": "none"}),
    "d2o, uniform layers, all merged": ("d2o", 0.2, {"budget_rule": "uniform", "threshold": "none"}),
    "d2o, plain average": ("d2o", 0.2, {"weighting": "average"}),
    "d2o, matched on values": ("d2o", 0.2, {"match_on": "values"}),
    "d2o, N:M = 1:1": ("d2o", 0.2, {"recent_ratio": 0.5}),
    "d2o, N:M = 1:3": ("d2o", 0.2, {"recent_ratio": 0.75}),
    "d2o, reciprocal variance": ("d2o", 0.2, {"density_rule": "reciprocal"}),
    "d2o, variance as printed": ("d2o", 0.2, {"variance_norm": "none"}),
}
CHUNKKV: Mapping[str, Case] = {
    "full cache": FULL,
    "snapkv": ("snapkv", 0.2, {}),
    "snapkv, no pool": ("snapkv", 0.2, {"kernel_size": 1}),
    **{f"chunks of {size}": ("chunkkv", 0.2, {"chunk_length": size}) for size in (3, 5, 10, 20, 30)},
    **{f"chunks of 10, {size} layers share": ("chunkkv", 0.2, {"reuse_layers": size}) for size in (2, 3, 5, 10)},
}
PARTS: Mapping[str, dict[str, Any]] = {
    "neither": {"rescored_share": 0.0, "bonus": 0.0},
    "cross-head": {"bonus": 0.0},
    "cross-layer": {"rescored_share": 0.0},
    "both": {},
}
K_VEC: Mapping[str, Case] = {
    "full cache": FULL,
    "snapkv": ("snapkv", 0.1, {}),
    "ada-snapkv": ("ada-snapkv", 0.1, {}),
    **{name: ("k-vec", 0.1, options) for name, options in PARTS.items()},
    **{f"{name}, pool of 7": ("k-vec", 0.1, {**PARTS[name], "kernel_size": 7}) for name in ("neither", "both")},
}
PAPERS: Mapping[str, Mapping[str, Case]] = {"d2o": D2O, "chunkkv": CHUNKKV, "k-vec": K_VEC}


def measure(demo: DemoModel, texts: list[Text], results: Results, papers: list[str], name_of_texts: str) -> None:
    """All numbers of all texts that are not there yet."""
    what = f"nll, {name_of_texts}"
    model = ContinuingModel(demo)
    for index, text in enumerate(texts):
        missing = [
            (paper, name) for paper in papers for name in PAPERS[paper] if not results.has(paper, what, name, index)
        ]
        if not missing:
            continue
        compressible = Compressible(demo.prefill(text.prompt))
        for paper, name in missing:
            policy, budget, options = PAPERS[paper][name]
            kept = compressible.keep(policy, budget, options)
            results.add(paper, what, name, index, model.loss(compressible, kept, text.continuation))
            results.write()
