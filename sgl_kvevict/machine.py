"""Checks of a machine at a server's start and by ``sgl-kvevict check``: what is needed, found, and to be done.

Imports neither SGLang nor torch at the top.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Literal

from sgl_kvevict.errors import ConfigError
from sgl_kvevict.paths import expanded, write_error

SUPPORTED_SGLANG = ("0.5.22", "0.5.23")
"""Tested versions, the newest last. A newer one may start (``compat.py``)."""
NO_DRAFTS_ON_CPU = "0.5.22"
"""It asks no platform for its workers of drafts, and its own need kernels that are compiled for a GPU."""
SGLANG_RANGE = " to ".join(dict.fromkeys((SUPPORTED_SGLANG[0], SUPPORTED_SGLANG[-1])))
FLASHINFER = ("0.7.1", "0.7.2")
"""The versions that these pin."""
MIN_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
"""Least compute capability that converts float8_e4m3fn."""
MIN_HOST_GIB = 4.0
INSTALL = 'pip install ".[gpu]" in a checkout, or `make setup` for a CPU'
PLUGIN, CPU_PLATFORM = "kvevict", "kvevict_cpu"
"""Names of our entry points."""
GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU; ``shared_kib``: shared memory that one program may ask for."""

    name: str
    capability: tuple[int, int]
    shared_kib: int
    free_gib: float
    total_gib: float


@dataclass(frozen=True)
class Machine:
    """Facts about a machine and its Python environment; None or empty: not there.

    Attributes:
        packages: version by name, of the packages that matter.
        plugins: names of our entry points that SGLang would find.
        excluded_by: the variable, with its value, that keeps SGLang from loading them.
        home: folder of this user.
        cache: folder in which PyTorch keeps what it compiles for SGLang, which makes it when it is imported.
        cache_error: why that cannot be written.
        host_gib: available host memory.
        numba_reason: why attention 'numba' cannot run here; None: it can.
        torch_cuda: CUDA version that torch is built for.
        gpus: visible to torch.
    """

    packages: dict[str, str] = field(default_factory=dict)
    plugins: frozenset[str] = frozenset()
    excluded_by: str | None = None
    home: str | None = None
    cache: str = ""
    cache_error: str | None = None
    cpu_flags: frozenset[str] = frozenset()
    host_gib: float = 0.0
    numba_reason: str | None = None
    torch_cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Check:
    """The result of one check; ``mend``: what to do, if anything.

    ``state``: ``warning`` means that a server starts, but slower or with less; ``missing``: it does not start.
    """

    name: str
    state: Literal["ok", "warning", "missing"]
    found: str
    mend: str = ""


def read_environment() -> Machine:
    """Collect the facts that :func:`check_environment` judges, without torch."""
    groups = ("sglang.srt.plugins", "sglang.srt.platforms")
    loaded = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    excluded_by = None
    if loaded and PLUGIN not in loaded:
        excluded_by = "SGLANG_PLUGINS"
    elif os.environ.get("SGLANG_PLATFORM", "") not in ("", CPU_PLATFORM):
        excluded_by = "SGLANG_PLATFORM"  # SGLang loads nothing else of a package that has another platform
    machine = Machine(
        plugins=frozenset(entry.name for group in groups for entry in entry_points(group=group)),
        excluded_by=excluded_by and f"{excluded_by}={os.environ[excluded_by]}",
    )
    try:
        home = expanded("~", "HOME")
    except ConfigError:
        return machine
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.environ.get("SGLANG_CACHE_DIR")
    cache = Path(chosen) if chosen else home / ".cache" / "sglang"
    return replace(machine, home=str(home), cache=str(cache), cache_error=write_error(cache))


def read_machine(devices: Sequence[int] | None = None) -> Machine:
    """Collect facts about this machine; takes seconds, because torch is imported.

    Each GPU in ``devices`` (None: all visible to torch) gets a CUDA context.
    """
    import torch

    from kvevict_kernels.device_limits import limits_of
    from kvevict_kernels.span_attention import reason_not_to_run

    gpus = []
    for index in range(torch.cuda.device_count()) if devices is None else devices:
        gpu = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        shared = limits_of(torch.device("cuda", index)).shared_per_block // 1024
        gpus.append(Gpu(gpu.name, (gpu.major, gpu.minor), shared, free / GIB, total / GIB))
    names = ("sglang", "torch", "triton", "numba", "flashinfer-python", "flashinfer-jit-cache")
    return replace(
        read_environment(),
        packages={name: found for name in names if (found := version_of(name))},
        cpu_flags=_cpu_flags(),
        host_gib=free_host_gib(),
        numba_reason=reason_not_to_run(),
        torch_cuda=torch.version.cuda,
        gpus=tuple(gpus),
    )


def check_machine(machine: Machine, device: str, dtype: str = "bfloat16", stored: str = "bfloat16") -> list[Check]:
    """Return the checks of everything a server on ``device`` ("cuda" or "cpu") needs besides :func:`check_packages`.

    ``dtype``: of the model, as torch prints it without ``torch.``; ``stored``: of the KV pool.
    """
    return _gpu_checks(machine) if device == "cuda" else _cpu_checks(machine, dtype, stored)


def check_packages(machine: Machine) -> list[Check]:
    """Check that the supported SGLang is installed."""
    sglang, mend = machine.packages.get("sglang"), f"install sglang=={SUPPORTED_SGLANG[-1]}: {INSTALL}"
    if sglang is None or sglang in SUPPORTED_SGLANG:
        return [_needs("SGLang", sglang is not None, sglang or "not installed", mend)]
    return [
        Check("SGLang", "warning", f"{sglang}; tested with {SGLANG_RANGE}", f"a start tells whether it fits; or {mend}")
    ]


def check_environment(machine: Machine) -> list[Check]:
    """Check that SGLang loads this package, and has a folder to write to; without either it ends with a traceback."""
    ours = {PLUGIN, CPU_PLATFORM} <= machine.plugins
    found = "SGLang finds it" if ours else "SGLang does not find it"
    plugin = _needs("plugin", ours, found, f"install this package into SGLang's environment: {INSTALL}")
    if machine.excluded_by is not None:
        plugin = Check("plugin", "missing", f"{machine.excluded_by} leaves it out", "unset that variable")
    if machine.home is None:
        return [plugin, Check("home", "missing", "this user has no home folder", "set HOME to a folder")]
    reason = machine.cache_error
    found = machine.cache if reason is None else f"{machine.cache} cannot be written ({reason})"
    mend = "set SGLANG_CACHE_DIR to a folder that can be: SGLang does not start without"
    return [plugin, Check("home", "ok", machine.home), _needs("cache", reason is None, found, mend)]


def _cpu_checks(machine: Machine, dtype: str, stored: str) -> list[Check]:
    kinds = {"AVX2": "avx2", "AVX-512": "avx512bw", "bfloat16": "avx512_bf16", "AMX": "amx_tile"}
    has = [name for name, flag in kinds.items() if flag in machine.cpu_flags]
    found = ", ".join(has) or "none of AVX2, AVX-512, bfloat16, AMX"
    is_slow = dtype == "bfloat16" and not has_fast_bfloat16(machine.cpu_flags)
    host = f"{machine.host_gib:.1f} GiB available"
    wide = Check("KV rows", "warning", stored, "a budget saves fewer bytes: start with --kv-cache-dtype bfloat16")
    return [
        *([wide] if stored == "float32" else []),
        _wants(
            "processor",
            not is_slow,
            found,
            "bfloat16 products are slow without AVX-512: start with --dtype float32 --kv-cache-dtype bfloat16",
        ),
        _wants(
            "numba",
            machine.numba_reason is None,
            machine.numba_reason or machine.packages.get("numba", ""),
            "attention 'torch' takes over, which takes longer: pip install numba",
        ),
        _wants(
            "memory", machine.host_gib >= MIN_HOST_GIB, host, "free some, or start with a smaller --max-total-tokens"
        ),
    ]


def _gpu_checks(machine: Machine) -> list[Check]:
    packages = machine.packages
    torch_found = f"{packages.get('torch')}, " + (
        f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "built for a CPU"
    )
    flashinfer = packages.get("flashinfer-python")
    cached = packages.get("flashinfer-jit-cache")
    compiled = "kernels are compiled at the first start, for minutes"
    return [
        _needs("torch", machine.torch_cuda is not None, torch_found, 'install torch for CUDA 13: pip install ".[gpu]"'),
        *_checks_of_gpus(machine.gpus),
        _needs("Triton", "triton" in packages, packages.get("triton", "not installed"), 'pip install ".[gpu]"'),
        _wants(
            "FlashInfer",
            flashinfer in FLASHINFER,
            f"{flashinfer or 'not installed'}, {'prebuilt kernels' if cached else compiled}",
            f"our own kernel takes over long prefills: install flashinfer-python=={FLASHINFER[-1]}",
        ),
    ]


def _checks_of_gpus(gpus: Sequence[Gpu]) -> list[Check]:
    """Check the lowest value of each property among the GPUs."""
    if not gpus:
        return [Check("GPU", "missing", "torch sees none", "see torch above")]
    capability = min(gpu.capability for gpu in gpus)
    names = ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in gpus).items())
    fp8 = "" if capability >= FP8_CAPABILITY else ", no fp8 KV"
    fullest = min(gpus, key=lambda gpu: gpu.free_gib / gpu.total_gib)
    return [
        _needs(
            "GPU",
            capability >= MIN_CAPABILITY,
            f"{names}, compute capability {capability[0]}.{capability[1]}{fp8}",
            "use a GPU of compute capability 8.0 (Ampere) or newer",
        ),
        Check("shared memory", "ok", f"{min(gpu.shared_kib for gpu in gpus)} KiB a program"),
        _wants(
            "free memory",
            fullest.free_gib >= 0.9 * fullest.total_gib,
            f"{fullest.free_gib:.1f} of {fullest.total_gib:.1f} GiB",
            "end what else uses the GPU, or start with a smaller --mem-fraction-static",
        ),
    ]


def _needs(name: str, is_there: bool, found: str, mend: str) -> Check:
    return Check(name, "ok", found) if is_there else Check(name, "missing", found, mend)


def _wants(name: str, is_there: bool, found: str, mend: str) -> Check:
    return Check(name, "ok", found) if is_there else Check(name, "warning", found, mend)


def version_of(package: str) -> str | None:
    """Of an installed package; None: it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def has_fast_bfloat16(cpu_flags: frozenset[str] | None = None) -> bool:
    """Whether a processor (None: this one) multiplies bfloat16 faster than float32; True if it is no x86.

    With AVX-512 PyTorch (oneDNN) does; with AVX2 alone bfloat16 products are ten times slower than float32.
    """
    flags = _cpu_flags() if cpu_flags is None else cpu_flags
    return not flags or {"avx512bw", "avx512dq", "avx512vl"} <= flags


def _cpu_flags() -> frozenset[str]:
    """Flags of an x86 processor; none of others."""
    found = re.search(r"^flags\s*:(.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def free_host_gib() -> float:
    """Available memory of the machine, limited by its control group."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE)
    # A container may have less than its machine reports; without a limit the file says "max".
    limit = _read(Path("/sys/fs/cgroup/memory.max"))
    available = int(found[1]) * 1024 if found else 0
    return (min(available, int(limit)) if limit.isdigit() else available) / GIB


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
