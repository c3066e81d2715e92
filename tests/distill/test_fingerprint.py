"""Fingerprints of models: every byte of every tensor counts, and what the cache holds is never trusted blindly."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sgl_kvevict.distill import fingerprint as module
from sgl_kvevict.distill.fingerprint import fingerprint_of


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The folder of the user's cache, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module._digests.cache_clear()
    return tmp_path / "cache" / "sgl-kvevict" / "fingerprints"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def tensors() -> dict[str, Tensor]:
    shapes = {"embedding": (4000, 64), "projection": (64, 128), "norm": (64,)}
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(i)).bfloat16()
        for i, (name, shape) in enumerate(shapes.items())
    }


def fingerprint_with(folder: Path, changed: dict[str, Tensor]) -> str:
    save_file(changed, folder / "model.safetensors")
    found = fingerprint_of(folder)
    assert found is not None
    return found


def test_one_changed_row_of_any_tensor_is_another_model(folder):
    """Trained rows of new tokens, for example: samples of the embedding miss them."""
    before = fingerprint_with(folder, tensors())
    for name in ("embedding", "projection", "norm"):
        for row in (1, len(tensors()[name]) // 3):
            changed = tensors()
            changed[name][row] += 0.01
            assert fingerprint_with(folder, changed) != before, (name, row)
    swapped = tensors()
    swapped["embedding"][[700, 701]] = swapped["embedding"][[701, 700]]
    assert fingerprint_with(folder, swapped) != before
    assert fingerprint_with(folder, tensors()) == before


def test_a_fingerprint_is_that_of_tensors_not_of_files(tmp_path):
    tensors = {name: torch.randn(40, 30, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("abc")}
    save_file(tensors, tmp_path / "one.safetensors")
    (tmp_path / "parts").mkdir()
    save_file({"c": tensors["c"]}, tmp_path / "parts" / "1.safetensors")
    save_file({"a": tensors["a"], "b": tensors["b"]}, tmp_path / "parts" / "2.safetensors", {"written": "today"})
    found = fingerprint_of(tmp_path)
    assert found is not None and found == fingerprint_of(tmp_path / "parts")
    save_file({**tensors, "b": tensors["b"].T.contiguous()}, tmp_path / "one.safetensors")
    assert fingerprint_of(tmp_path) != found


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, (2).to_bytes(8, "little") + b"[]", b"\x02" + b"\0" * 7 + b"{x"])
def test_what_cannot_be_read_has_no_fingerprint(tmp_path, content):
    assert fingerprint_of(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(content)
    assert fingerprint_of(tmp_path) is None


def num_hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each tensor that is hashed."""
    hashed: list[int] = []
    original = module._hash
    monkeypatch.setattr(module, "_hash", lambda *arguments: hashed.append(1) or original(*arguments))
    return hashed


def test_a_file_is_read_once_until_it_changes(folder, monkeypatch):
    hashed = num_hashed(monkeypatch)
    found = fingerprint_with(folder, tensors())
    assert len(hashed) == 3
    module._digests.cache_clear()  # another process
    assert fingerprint_of(folder) == found and len(hashed) == 3
    path = folder / "model.safetensors"
    status = path.stat()
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)  # as long, in the same place,
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # and as old
    module._digests.cache_clear()
    assert fingerprint_of(folder) != found and len(hashed) == 6


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"[]", b"{}", b'{"state": 1, "digests": {"norm": 2}}'])
def test_a_broken_cache_is_written_anew(folder, cache, garbage, monkeypatch):
    hashed = num_hashed(monkeypatch)
    found = fingerprint_with(folder, tensors())
    (entry,) = cache.glob("*.json")
    sound = entry.read_bytes()
    for content in (garbage, json.dumps({**json.loads(sound), "digests": {}}).encode()):
        entry.write_bytes(content)
        module._digests.cache_clear()
        hashed.clear()
        assert fingerprint_of(folder) == found and len(hashed) == 3
        assert entry.read_bytes() == sound


def test_a_cache_that_cannot_be_written_is_done_without(folder, cache):
    cache.parent.mkdir(parents=True)
    cache.touch()  # a file where the folder should be
    found = fingerprint_with(folder, tensors())
    cache.unlink()
    module._digests.cache_clear()
    assert fingerprint_of(folder) == found
