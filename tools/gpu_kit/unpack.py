"""Unpack the kit's parts, on the GPU machine, and write the environment in which SGLang runs from them.

    python3 tools/gpu_kit/unpack.py FOLDER [--kit /tmp/kit] && . /tmp/kit/env.sh

Run it from the repository's root with the folder that holds the parts and their ``SHA256SUMS``, in every command that
brings a part: parts that an earlier command unpacked are known by a stamp and are skipped. A damaged part is refused
before anything of it is unpacked. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from gpu_kit import packing  # noqa: E402

PIECES = 3
"""Files that the model's GGUF file is cut into, each below what one transfer takes."""
MODEL = "SmolLM2-135M-Instruct"
GGUF = f"{MODEL}.Q4_1.gguf"
DIFFERENCES = "DIFFERENCES.txt"


class KitError(RuntimeError):
    """A part cannot be used; the message names it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", type=Path, help="folder with the parts and SHA256SUMS")
    parser.add_argument("--kit", type=Path, default=Path("/tmp/kit"), help="folder to unpack into")
    args = parser.parse_args(arguments)
    start = time.monotonic()
    try:
        unpacked = unpack(args.parts, args.kit)
        join_model(args.kit)
        write_environment(args.kit)
    except (KitError, OSError, ValueError) as error:
        print(f"unpack: {error}", file=sys.stderr)
        return 1
    compile_bytecode(args.kit / "site")
    if (differences := args.kit / DIFFERENCES).exists():
        print(differences.read_text())
    names = ", ".join(path.name for path in unpacked) or "nothing new"
    print(f"unpacked {names} into {args.kit} in {time.monotonic() - start:.1f} s", flush=True)
    return 0


def unpack(parts: Path, kit: Path) -> list[Path]:
    """Check and unpack the parts of a folder that are not unpacked yet, at the same time; returns those.

    Raises:
        KitError: a part does not have the checksum of ``SHA256SUMS``, or is not listed there; or there is no part and
            none was unpacked before.
    """
    kit.mkdir(parents=True, exist_ok=True)
    found = sorted([*parts.glob("*.tar.xz"), *parts.glob("*.gguf-part")])
    if not found and not list(kit.glob(".done-*")):
        raise KitError(f"{parts} has no parts (*.tar.xz, *.gguf-part), and none was unpacked before")
    sums = packing.read_sums(parts) if found else {}
    new = []
    for path in found:
        if path.name not in sums:
            raise KitError(f"{path.name} is not listed in {parts / packing.SUMS}")
        if not _stamp(kit, sums[path.name]).exists():
            new.append(path)
    with ProcessPoolExecutor(max(1, len(new))) as pool:
        jobs = [pool.submit(unpack_part, path, kit, sums[path.name]) for path in new]
        for job in jobs:
            job.result()
    return new


def unpack_part(path: Path, kit: Path, expected: str) -> None:
    """Check and unpack one part.

    Raises:
        KitError: its checksum is not ``expected``.
    """
    if (got := packing.sha256(path)) != expected:
        raise KitError(f"{path.name} is damaged: its checksum is {got[:16]}..., expected {expected[:16]}...")
    if path.name.endswith(".tar.xz"):
        packing.extract(path, kit)
    else:
        (kit / "smollm2").mkdir(exist_ok=True)
        shutil.copy(path, kit / "smollm2" / path.name)
    _stamp(kit, expected).touch()


def _stamp(kit: Path, digest: str) -> Path:
    return kit / f".done-{digest[:16]}"


def join_model(kit: Path) -> None:
    """Join the pieces of the model's file as soon as all are there, where ``sgl-kvevict model`` looks for a download.

    That command checks the file and converts it; ``XDG_CACHE_HOME`` of the kit's environment says where it looks.
    """
    pieces = sorted((kit / "smollm2").glob("*.gguf-part"))
    if len(pieces) < PIECES:
        return
    target = kit / "cache" / "sgl-kvevict" / "models" / f".{MODEL}.parts" / "000"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    for piece in pieces:
        piece.unlink()


def write_environment(kit: Path) -> Path:
    """Write ``env.sh``: paths, SGLang's own switches (``DIFFERENCES.txt`` says why), and where caches lie."""
    cache = kit / "cache"
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (kit / "site", ROOT, ROOT / "kernels", ROOT / "tools"))),
        "GPU_KIT": kit,
        "KIT_PREBUILT": kit / "prebuilt",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": 1,
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "CUDA_HOME": find_cuda(),
        "HF_HUB_OFFLINE": 1,
        "TRANSFORMERS_OFFLINE": 1,
        "PYTHONUNBUFFERED": 1,
        "TOKENIZERS_PARALLELISM": "false",
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": cache,
        "FLASHINFER_DISABLE_VERSION_CHECK": 1,
        "SGLANG_JIT_CACHE_DIR": cache / "sglang",
        "TRITON_CACHE_DIR": cache / "triton",
        "XDG_CACHE_HOME": cache,
    }
    path = kit / "env.sh"
    path.write_text("".join(f"export {name}={shlex.quote(str(value))}\n" for name, value in variables.items()))
    return path


def find_cuda() -> str:
    """Folder of the CUDA toolkit: ``CUDA_HOME``, /usr/local/cuda, or that of the nvcc on PATH; the second if none."""
    usual = Path("/usr/local/cuda")
    if home := os.environ.get("CUDA_HOME"):
        return home
    nvcc = shutil.which("nvcc")
    if (usual / "bin" / "nvcc").exists() or nvcc is None:
        return str(usual)
    return str(Path(nvcc).resolve().parents[1])


def compile_bytecode(site: Path) -> None:
    """Compile all modules once, on all cores: otherwise each of a server's processes would compile what it imports."""
    done = site / ".compiled"
    if (site / "sglang").is_dir() and not done.exists():
        command = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(site)]
        # Some files are templates that are no Python; importing does not need the bytecode.
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        done.touch()


if __name__ == "__main__":
    sys.exit(main())
