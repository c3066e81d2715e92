"""Containers, compose file and dashboard name files, flags, pins and metrics that exist; Docker is not needed."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from sgl_kvevict.config import parse_config

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yml").read_text())


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each target of the Dockerfile."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            name = rest.rpartition(" AS ")[2]
            found[name] = []
        elif line and not line.startswith("#"):
            found[name].append((word, rest))
    return found


STAGES = stages()


@pytest.mark.parametrize("stage", STAGES)
def test_an_image_copies_what_is_there_and_what_the_context_holds(stage: str) -> None:
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    context = {line[1:] for line in ignore if line.startswith("!")}
    assert ignore[0] == "*" and all((ROOT / name).exists() for name in context)
    copied = [name for word, rest in STAGES[stage] if word == "COPY" for name in rest.split()[:-1]]
    assert copied and set(copied) <= context
    named = {
        path for word, rest in STAGES[stage] if word == "RUN" for path in re.findall(r"requirements/[\w.-]+", rest)
    }
    assert named and all((ROOT / path).is_file() for path in named)


def test_the_cpu_image_takes_the_steps_of_make_setup() -> None:
    """The one package with dependencies of its own, then the lock file without any."""
    torch, lock, *_ = [rest for word, rest in STAGES["cpu"] if word == "RUN"]
    assert torch.endswith('"$(grep ^torch== requirements/torch.txt)"') and "--no-deps" not in torch
    assert lock.endswith("--no-deps -r requirements/torch.txt -r requirements/cpu.txt")


def test_the_gpu_image_takes_the_torch_of_sglang() -> None:
    """Its constraints pin none: SGLang wants another one there than the CPU profile has."""
    (constraints,) = re.findall(r"-c (\S+)", " ".join(rest for _, rest in STAGES["gpu"]))
    assert re.findall(r"^(torch\w*|triton)==", (ROOT / constraints).read_text(), re.MULTILINE) == []


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_an_image_holds_what_the_package_is_built_from_and_starts_the_command(stage: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {name for word, rest in STAGES[stage] if word == "COPY" for name in rest.split()[:-1]}
    built_from = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    built_from |= {
        "sgl_kvevict" if folder == "." else folder
        for folder in project["tool"]["setuptools"]["packages"]["find"]["where"]
    }
    assert built_from <= copied
    instructions = dict(STAGES[stage])
    assert json.loads(instructions["ENTRYPOINT"]) == [next(iter(project["project"]["scripts"])), "serve"]
    assert instructions["USER"] != "root"


def test_the_compose_file_fits_the_images() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        build = service["build"]
        assert (DEPLOY / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file() and build["target"] in STAGES
    replicas = {name: service for name, service in services.items() if name != "gateway"}
    gateway = services["gateway"]
    assert len(replicas) == 2 and gateway["depends_on"].keys() == replicas.keys()
    urls = [word for word in gateway["command"] if "://" in word]
    assert urls == [f"http://{name}:30000" for name in replicas]
    assert all(port.startswith("127.0.0.1:") for port in gateway["ports"])  # nothing here authenticates
    made = "\n".join(rest for word, rest in STAGES["cpu"] if word == "RUN")
    for service in replicas.values():
        assert "ports" not in service
        config = parse_config(json.loads(service["environment"]["KVEVICT_CONFIG"]), "compose.yml")
        mounts = dict(volume.split(":") for volume in service["volumes"])
        assert mounts.keys() == COMPOSE["volumes"].keys() and config.store == mounts["store"]
        assert all(place in made for place in mounts.values())  # made in the image, so that its user owns the volume
