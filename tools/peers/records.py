"""The file that carries one prompt from kvpress' environment to ours: tensors of the model run, kept sets.

Layout (safetensors), L layers, H KV heads, Hq query heads, N tokens, D head size:
    queries [L, N, Hq, D], keys [L, N, H, D], values [L, N, H, D]   float32, after RoPE, of the SDPA run
    lse [L, N, Hq]                      float32, natural log-sum-exp of each query's scaled scores
    accumulated [L, H, N]               float32, attention of all queries summed, mean over a group, of the eager run
    kept/<share>/<case> [L, H, N]       bool, what the press kept
    scores/<share>/<case> [L, H, N]     float32, the press's scores, to tell rounding from difference
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from peers.cases import KEPT_SHARES, make_cases

_HERE = Path(__file__).resolve().parent
_SOURCES = (
    *(_HERE / name for name in ("prompts.py", "records.py", "record_kvpress.py", "alice.txt")),
    *(_HERE.parents[1] / name for name in ("LICENSE", "requirements/peers.txt")),
)


def records_dir() -> Path:
    """Folder of the recordings made from these sources and presses: about 0.5 GB, may be deleted at any time."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    sources = b"".join(path.read_bytes() for path in _SOURCES)
    presses = [(case.name, case.press) for share in KEPT_SHARES for case in make_cases(1000, share)]
    digest = hashlib.sha256(sources + repr(presses).encode()).hexdigest()[:12]
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "sgl-kvevict" / "peers" / digest


def record_path(prompt_name: str) -> Path:
    """The recording of one prompt."""
    return records_dir() / f"{prompt_name}.safetensors"


def kept_key(kept_share: float, case_name: str) -> str:
    """Name of a kept set in the file."""
    return f"kept/{kept_share}/{case_name}"


def scores_key(kept_share: float, case_name: str) -> str:
    """Name of a press's scores in the file."""
    return f"scores/{kept_share}/{case_name}"
