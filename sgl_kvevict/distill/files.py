"""Files of what was learned of a model: safetensors, named by its fingerprint."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvevict_kernels.rotary import Rotary
from kvevict_kernels.row_codec import RowStatistics
from sgl_kvevict.distill.features import NUM_WINDOW, num_cache_features
from sgl_kvevict.distill.row_sums import STATISTICS
from sgl_kvevict.distill.weights import ScoreWeights
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.paths import cache_folder, replace_file

_VERSION = 3
FORMAT = f"sgl-kvevict score weights {_VERSION}"
_FOLDER = f"score-weights/{_VERSION}"
"""In the user's cache; versions of this package that write other formats leave each other's files alone."""
_SCORES = ("cache", "window")
ROTARY_TOLERANCE = 0.01
"""Some models store their tables in bfloat16."""


@dataclass(frozen=True)
class ModelIdentity:
    """The model that weights belong to: attention layers, and KV heads of all ranks together."""

    name: str
    fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rotary: Rotary
    is_latent: bool = False

    @property
    def first_rotation(self) -> Tensor:
        """[rotary_dim], float32: cosines and sines of position 1, which determine all frequencies."""
        return self.rotary.cos_sin[1].float().cpu().contiguous()


@dataclass(frozen=True)
class Learned:
    """What is learned of a model, once, before a server opens its port; each part is there or not.

    Attributes:
        scores: of all heads.
        statistics: of all heads, with which rows of 4 bits are written and read.
    """

    scores: ScoreWeights | None = None
    statistics: RowStatistics | None = None

    def completed_by(self, other: Learned) -> Learned:
        """What is here, and of the rest what the other one has."""
        return Learned(self.scores or other.scores, self.statistics or other.statistics)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by their names in a file."""
        parts = ((self.scores, _SCORES), (self.statistics, STATISTICS))
        return {name: getattr(part, name).cpu().contiguous() for part, names in parts if part for name in names}

    def digest(self) -> str:
        """SHA-256 of all tensors, 64 hexadecimal digits."""
        digest = hashlib.sha256()
        for name, tensor in self.tensors().items():
            digest.update(name.encode() + b"\0" + tensor.numpy().tobytes())
        return digest.hexdigest()


def save_learned(path: Path, learned: Learned, model: ModelIdentity) -> None:
    """Write a file and rename it into place, so that a reader finds all of it or none; OSError if that fails."""
    metadata = {
        "format": FORMAT,
        "model": model.name,
        "fingerprint": model.fingerprint,
        "is_neox": str(model.rotary.is_neox),
    }
    if learned.scores is not None:
        recall = learned.scores.recall
        metadata["prefixes"] = str(learned.scores.num_prefixes)
        metadata["recall"] = "" if recall is None else f"{recall:.3f}"
    content = save({**learned.tensors(), "rotary": model.first_rotation}, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


def check_format(path: Path) -> None:
    """Check the header of a file; ConfigError if it cannot be read or has another format."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"score weights {str(path)!r} cannot be read: {error}") from error
    has_parts = [names.issuperset(part) for part in (_SCORES, STATISTICS)]
    if metadata.get("format") != FORMAT or "rotary" not in names or not any(has_parts):
        raise ConfigError(f"score weights {str(path)!r}: got format {metadata.get('format')!r}; allowed: {FORMAT!r}")


def load_learned(path: Path, model: ModelIdentity) -> Learned:
    """Read what was learned of a model; ConfigError if unreadable, of another format, or of another model."""
    check_format(path)
    with safe_open(path, framework="pt") as file:
        metadata, names = file.metadata(), file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
    # A file that fits by its shapes may be of another model: scores would then keep the wrong entries, and nothing
    # would fail.
    problems = list(_differences(metadata, tensors, model))
    if problems:
        raise ConfigError(
            f"score weights {str(path)!r} belong to {metadata.get('model')!r}, not to {model.name!r}: "
            f"{'; '.join(problems)}"
        )
    recall = metadata.get("recall")
    try:
        numbers = int(metadata.get("prefixes", "0")), float(recall) if recall else None
    except ValueError as error:
        raise ConfigError(f"score weights {str(path)!r}: prefixes and recall: expected numbers: {error}") from error
    scores = ScoreWeights(tensors["cache"], tensors["window"], *numbers) if "cache" in tensors else None
    statistics = RowStatistics(*(tensors[name] for name in STATISTICS)) if STATISTICS[0] in tensors else None
    return Learned(scores, statistics)


def files_of(model: ModelIdentity) -> list[Path]:
    """Where weights of a model may lie: in the user's cache, to which servers write, and in this package."""
    name = f"{model.fingerprint[:16]}.safetensors"
    return [cache_folder(_FOLDER) / name, Path(__file__).with_name("known") / name]


def _differences(metadata: dict[str, str], tensors: dict[str, Tensor], model: ModelIdentity) -> list[str]:
    problems = []
    if metadata.get("fingerprint") != model.fingerprint:
        problems.append(f"fingerprint {str(metadata.get('fingerprint'))[:16]!r} instead of {model.fingerprint[:16]!r}")
    columns = num_cache_features(model.head_dim, model.is_latent)
    widths = {"cache": columns, "window": columns + NUM_WINDOW} | dict.fromkeys(STATISTICS, model.head_dim)
    present = [part for part in (_SCORES, STATISTICS) if not tensors.keys().isdisjoint(part)]
    for name in itertools.chain(*present):
        if name not in tensors:
            problems.append(f"{name} is missing")
            continue
        got, want = tuple(tensors[name].shape), (model.num_layers, model.num_kv_heads, widths[name])
        if got != want or tensors[name].dtype != torch.float32:
            problems.append(f"{name} is {got} {tensors[name].dtype} instead of {want} float32")
        elif not tensors[name].isfinite().all():
            problems.append(f"{name} has values that are not finite")
        elif name.endswith("_scale") and not (tensors[name] > 0).all():
            problems.append(f"{name} has values that are not positive")
    ours, theirs = model.first_rotation, tensors["rotary"].float()
    same = ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=ROTARY_TOLERANCE)
    if not same or metadata.get("is_neox") != str(model.rotary.is_neox):
        problems.append("another rotary embedding")
    return problems
