"""Versions of what computes, and what is said beside figures of an SGLang that was not installed as released."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

PACKAGES = ("torch", "triton", "transformers", "sglang", "sglang-kernel", "flashinfer-python")


def versions() -> dict[str, str]:
    """Version of Python and of each package; "not installed" where there is none."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def differences() -> str:
    """What differs from an installation of SGLang, if it runs from the kit of ``tools/gpu_kit``; else nothing."""
    path = Path(os.environ.get("GPU_KIT", "/nowhere")) / "DIFFERENCES.txt"
    return path.read_text() if path.exists() else ""
