"""Learned weights as files: found by what they belong to, refused by name otherwise."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvevict_kernels.rotary import Rotary
from kvevict_kernels.row_codec import RowStatistics
from kvevict_tools.models import model_path
from sgl_kvevict.distill import files
from sgl_kvevict.distill.features import NUM_WINDOW, num_cache_features
from sgl_kvevict.distill.files import Learned, ModelIdentity, load_learned, save_learned
from sgl_kvevict.distill.fingerprint import fingerprint_of
from sgl_kvevict.distill.weights import ScoreWeights
from sgl_kvevict.errors import ConfigError

ANGLES = torch.outer(torch.arange(10.0), torch.logspace(0, -3, 4))
MODEL = ModelIdentity("mine", "ab" * 32, 3, 2, 8, Rotary(torch.cat([ANGLES.cos(), ANGLES.sin()], dim=-1), is_neox=True))
SCORES = ScoreWeights(torch.randn(3, 2, 20), torch.randn(3, 2, 22), num_prefixes=7, recall=0.875)
STATISTICS = RowStatistics(*(torch.rand(3, 2, 8) + 0.1 for _ in range(4)))
LEARNED = Learned(SCORES, STATISTICS)
PARTS = [LEARNED, Learned(SCORES), Learned(None, STATISTICS)]


@pytest.mark.parametrize("learned", PARTS, ids=["both", "scores", "statistics"])
def test_what_was_written_is_read(tmp_path, learned):
    path = tmp_path / "deep" / "weights.safetensors"
    save_learned(path, learned, MODEL)
    read = load_learned(path, MODEL)
    assert read.digest() == learned.digest()
    assert (read.scores is None, read.statistics is None) == (learned.scores is None, learned.statistics is None)
    if read.scores is not None:
        assert torch.equal(read.scores.cache, SCORES.cache) and torch.equal(read.scores.window, SCORES.window)
        assert (read.scores.num_prefixes, read.scores.recall) == (7, 0.875)
    if read.statistics is not None:
        assert torch.equal(read.statistics.k_mean, STATISTICS.k_mean)
        assert torch.equal(read.statistics.v_scale, STATISTICS.v_scale)
    assert [entry.name for entry in path.parent.iterdir()] == ["weights.safetensors"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()  # others who share the folder read it


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_parts_come_from_the_first_who_has_them():
    others = Learned(replace(SCORES, num_prefixes=1), RowStatistics(*(torch.ones(3, 2, 8) for _ in range(4))))
    assert Learned(SCORES).completed_by(others) == Learned(SCORES, others.statistics)
    assert Learned(None, STATISTICS).completed_by(others) == Learned(others.scores, STATISTICS)
    assert len({part.digest() for part in [*PARTS, others, Learned()]}) == 5


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(PermissionError):
        save_learned(tmp_path / "weights.safetensors", LEARNED, MODEL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "cd" * 32}, "fingerprint 'abababababababab' instead of 'cdcdcdcdcdcdcdcd'"),
        ({"num_layers": 4}, r"cache is \(3, 2, 20\) torch.float32 instead of \(4, 2, 20\)"),
        ({"num_kv_heads": 1}, r"window is \(3, 2, 22\)"),
        ({"head_dim": 16}, r"instead of \(3, 2, 36\)"),
        ({"rotary": Rotary(torch.cat([ANGLES.cos(), ANGLES.sin()], -1), is_neox=False)}, "another rotary embedding"),
        ({"rotary": Rotary(torch.cat([(2 * ANGLES).cos(), (2 * ANGLES).sin()], -1), True)}, "another rotary"),
        ({"rotary": Rotary(torch.zeros(10, 0), True)}, "another rotary embedding"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(tmp_path, change, reason):
    path = tmp_path / "weights.safetensors"
    save_learned(path, LEARNED, MODEL)
    with pytest.raises(ConfigError, match=f"belong to 'mine', not to 'other'.*{reason}"):
        load_learned(path, replace(MODEL, name="other", **change))  # type: ignore[arg-type]


def test_what_is_no_such_file_is_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_learned(path, MODEL)
    path.write_bytes(pickle.dumps({"cache": [1, 2]}))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_learned(path, MODEL)
    save_file({"cache": torch.zeros(3)}, path)
    with pytest.raises(ConfigError, match="got format None; allowed: 'sgl-kvevict score weights 3'"):
        load_learned(path, MODEL)
    save_learned(path, LEARNED, MODEL)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_learned(path, MODEL)
    save_learned(path, Learned(replace(SCORES, cache=torch.full((3, 2, 20), torch.nan))), MODEL)
    with pytest.raises(ConfigError, match="cache has values that are not finite"):
        load_learned(path, MODEL)


def test_statistics_that_no_row_can_be_written_with_are_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    written = LEARNED.tensors() | {"rotary": MODEL.first_rotation}
    metadata = {"format": files.FORMAT, "fingerprint": MODEL.fingerprint, "is_neox": "True"}
    changes: list[tuple[dict[str, Tensor], str]] = [
        ({"v_scale": torch.full((3, 2, 8), torch.nan)}, "v_scale has values that are not finite"),
        ({"v_scale": torch.zeros(3, 2, 8)}, "v_scale has values that are not positive"),
        ({"k_mean": torch.zeros(3, 2, 16)}, r"k_mean is \(3, 2, 16\) torch.float32 instead of \(3, 2, 8\)"),
    ]
    cases = [(written | change, reason) for change, reason in changes]
    cases.append(({name: tensor for name, tensor in written.items() if name != "k_mean"}, "k_mean is missing"))
    cases.append(({name: written[name] for name in ("k_mean", "rotary")}, "got format"))
    for tensors, reason in cases:
        save_file(tensors, path, metadata)
        with pytest.raises(ConfigError, match=reason):
            load_learned(path, MODEL)


def test_versions_with_other_formats_share_no_file_of_the_users_cache():
    cached, shipped = files.files_of(MODEL)
    assert cached.name == shipped.name == "abababababababab.safetensors"
    assert cached.parent.name == files.FORMAT.rpartition(" ")[2]


@pytest.mark.parametrize(("name", "recall"), [("demo", 0.8), ("qwen-0.5b", 0.78), ("qwen-1.5b", 0.76)])
def test_those_of_some_named_models_come_with_the_package(name, recall):
    folder = model_path(name)
    if folder is None:
        pytest.skip(f"the model {name} has not been made")
    fingerprint = fingerprint_of(folder)
    assert fingerprint is not None
    config = json.loads((folder / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    sizes = (config["num_hidden_layers"], config["num_key_value_heads"], head_dim)
    path = files.files_of(replace(MODEL, fingerprint=fingerprint))[-1]
    assert path.is_file() and path.stat().st_size < 250_000
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    angles = torch.outer(torch.arange(2.0), theta ** -(torch.arange(0, head_dim, 2) / head_dim))
    rotary = Rotary(torch.cat([angles.cos(), angles.sin()], dim=-1), is_neox=True)
    learned = load_learned(path, ModelIdentity(name, fingerprint, *sizes, rotary))
    weights, statistics = learned.scores, learned.statistics
    assert weights is not None and statistics is not None
    assert statistics.k_mean.shape == (*sizes[:2], head_dim)
    assert weights.window.shape == (*sizes[:2], num_cache_features(head_dim) + NUM_WINDOW)
    assert weights.recall is not None and weights.recall > recall
