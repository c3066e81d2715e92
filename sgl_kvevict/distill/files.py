"""Files of learned weights: safetensors, named by the fingerprint of their model."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.distill.features import NUM_WINDOW, num_cache_features
from sgl_kvevict.distill.weights import ScoreWeights
from sgl_kvevict.errors import ConfigError

FORMAT = "sgl-kvevict score weights 1"
ROTARY_TOLERANCE = 0.01
"""Some models store their tables in bfloat16."""
_SAMPLES = 8
_SAMPLE_BYTES = 64
_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 1 << 28


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
    def shape(self) -> tuple[int, int, int]:
        """Shape of ``ScoreWeights.cache``."""
        return self.num_layers, self.num_kv_heads, num_cache_features(self.head_dim, self.is_latent)

    @property
    def first_rotation(self) -> Tensor:
        """[rotary_dim], float32: cosines and sines of position 1, which determine all frequencies."""
        return self.rotary.cos_sin[1].float().cpu().contiguous()


def save_weights(path: Path, weights: ScoreWeights, model: ModelIdentity) -> None:
    """Write a file and rename it into place, so that a reader finds all of it or none; OSError if that fails."""
    tensors = {"cache": weights.cache, "window": weights.window, "rotary": model.first_rotation}
    metadata = {
        "format": FORMAT,
        "model": model.name,
        "fingerprint": model.fingerprint,
        "is_neox": str(model.rotary.is_neox),
        "prefixes": str(weights.num_prefixes),
        "recall": "" if weights.recall is None else f"{weights.recall:.3f}",
    }
    content = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # hosts may share the folder
    try:
        scratch.write_bytes(content)
        scratch.rename(path)
    finally:
        scratch.unlink(missing_ok=True)


def check_format(path: Path) -> None:
    """Check the header of a file; ConfigError if it cannot be read or has another format."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"score weights {str(path)!r} cannot be read: {error}") from error
    if metadata.get("format") != FORMAT or not {"cache", "window", "rotary"} <= names:
        raise ConfigError(f"score weights {str(path)!r}: got format {metadata.get('format')!r}; allowed: {FORMAT!r}")


def read_recall(path: Path) -> float | None:
    """Recall of the weights in a file, a share; None: it was not measured. ConfigError as for :func:`check_format`."""
    check_format(path)
    with safe_open(path, framework="pt") as file:
        recall = file.metadata().get("recall")
    return float(recall) if recall else None


def load_weights(path: Path, model: ModelIdentity) -> ScoreWeights:
    """Read the weights of a model; ConfigError if unreadable, of another format, or of another model."""
    check_format(path)
    with safe_open(path, framework="pt") as file:
        metadata, names = file.metadata(), file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
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
    return ScoreWeights(tensors["cache"], tensors["window"], *numbers)


def find_weights(model: ModelIdentity, folders: list[Path]) -> Path | None:
    """The weights file of a model in the first folder that has one."""
    candidates = (folder / file_name(model) for folder in folders)
    return next((path for path in candidates if path.is_file()), None)


def file_name(model: ModelIdentity) -> str:
    """File name of a model's weights."""
    return f"{model.fingerprint[:16]}.safetensors"


def weights_folders() -> list[Path]:
    """Folders to search: the user's cache, then the weights shipped with this package."""
    return [cache_folder(), Path(__file__).with_name("known")]


def cache_folder() -> Path:
    """Where servers keep what they learned: ``sgl-kvevict/score-weights`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    cache = Path(cache_home) if cache_home else Path.home() / ".cache"
    return cache / "sgl-kvevict" / "score-weights"


def cached_file(model: ModelIdentity) -> Path:
    """The file in which servers keep the weights of a model."""
    return cache_folder() / file_name(model)


def _differences(metadata: dict[str, str], tensors: dict[str, Tensor], model: ModelIdentity) -> list[str]:
    problems = []
    if metadata.get("fingerprint") != model.fingerprint:
        problems.append(f"fingerprint {str(metadata.get('fingerprint'))[:16]!r} instead of {model.fingerprint[:16]!r}")
    num_layers, num_heads, columns = model.shape
    for name, width in (("cache", columns), ("window", columns + NUM_WINDOW)):
        got, want = tuple(tensors[name].shape), (num_layers, num_heads, width)
        if got != want or tensors[name].dtype != torch.float32:
            problems.append(f"{name} is {got} {tensors[name].dtype} instead of {want} float32")
        elif not tensors[name].isfinite().all():
            problems.append(f"{name} has values that are not finite")
    ours, theirs = model.first_rotation, tensors["rotary"].float()
    same = ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=ROTARY_TOLERANCE)
    if not same or metadata.get("is_neox") != str(model.rotary.is_neox):
        problems.append("another rotary embedding")
    return problems


def fingerprint_of(folder: Path) -> str | None:
    """SHA-256 over names, types, shapes and eight samples of all tensors of a model folder.

    Independent of the split into files; different for fine-tuned variants. None if there are no safetensors files, or
    one cannot be read.
    """
    found: list[tuple[str, bytes]] = []
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                found += _tensors(file)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not found:
        return None
    digest = hashlib.sha256()
    for name, content in sorted(found):
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


def _tensors(file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Each tensor's name, and its type, shape and sampled bytes."""
    length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"a header that is a {type(header).__name__}")
    data = _HEADER_LENGTH_BYTES + length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        parts = [f"{entry['dtype']} {entry['shape']}".encode()]
        for i in range(_SAMPLES):
            file.seek(data + begin + max(end - begin - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1))
            parts.append(file.read(min(_SAMPLE_BYTES, end - begin)))
        yield name, b"".join(parts)
