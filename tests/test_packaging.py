"""What an installed package must have, and what the requirement files must say."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import release_notes as notes

from sgl_kvevict.machine import SGLANG_RANGE, SUPPORTED_SGLANG

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ("torch", "cpu", "dev")
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;#]+)$")


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirement_lines(name: str) -> list[str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins() -> dict[str, str]:
    """Version of every package of the CPU profile, by normalised name."""
    matches = [PIN.match(line) for name in REQUIREMENTS for line in requirement_lines(name)]
    return {normalised(match["name"]): match["version"] for match in matches if match}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def python(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_folders_that_share_a_name_with_a_package_have_no_init():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_kernels_is_the_installed_package_even_in_the_repository_root() -> None:
    # SGLang depends on PyPI's `kernels`; a package of ours by that name would hide it from python here.
    file = python("import kernels; print(kernels.__file__)", ROOT)
    assert Path(file).parent.parent.name == "site-packages"


def test_our_packages_import_from_anywhere_without_sglang(tmp_path):
    code = "import sgl_kvevict.cli, kvevict_kernels, sys; print({'sglang', 'torch'} & set(sys.modules))"
    assert python(code, tmp_path) == "set()"


def test_a_plain_install_has_all_that_is_imported(project):
    """Except the adapter, which needs SGLang, and Triton kernels; packages imported in functions are optional."""
    declared = {normalised(re.split(r"[\[<>=]", name)[0]) for name in project["project"]["dependencies"]}
    modules = {"zmq": "pyzmq", "llvmlite": "numba"}
    missing: dict[str, str] = {}
    for folder in (ROOT / "sgl_kvevict", ROOT / "kernels" / "kvevict_kernels"):
        for path in folder.rglob("*.py"):
            if "sglang_adapter" in path.parts or path.name.startswith("triton_"):
                continue
            for node in ast.parse(path.read_text()).body:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                for name in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names):
                    if name not in ("sgl_kvevict", "kvevict_kernels") and modules.get(name, name) not in declared:
                        missing[name] = str(path.relative_to(ROOT))
    assert missing == {}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A source distribution, and the wheel that is built from it, as `pip install` of the former does."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("sgl_kvevict", "kernels", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    python(f"import setuptools.build_meta as b; b.build_sdist({str(folder)!r})", source)
    (sdist,) = folder.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    command += ["--no-index", "--wheel-dir", str(folder), str(sdist)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_the_wheel_holds_both_packages_and_nothing_else(built, project):
    sdist, wheel = built
    version = project["project"]["version"]
    assert sdist.name == f"sgl_kvevict-{version}.tar.gz" and wheel.name == f"sgl_kvevict-{version}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    for folder, package in ((ROOT, "sgl_kvevict"), (ROOT / "kernels", "kvevict_kernels")):
        modules = {path.relative_to(folder).as_posix() for path in (folder / package).rglob("*.py")}
        assert modules <= set(names)
        assert f"{package}/py.typed" in names
    assert {"sgl_kvevict/cli/inspect_page.html", "sgl_kvevict/sglang_adapter/signatures.json"} <= set(names)
    weights = [path.name for path in (ROOT / "sgl_kvevict" / "distill" / "known").glob("*.safetensors")]
    assert weights and {f"sgl_kvevict/distill/known/{name}" for name in weights} <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sgl_kvevict", "kvevict_kernels"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(built, project, tmp_path):
    """Its dependencies are those of this environment, found behind it; this checkout is not."""
    clean = tmp_path / "clean"
    venv.create(clean, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(clean), "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, str(built[1])], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (packages,) = clean.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*command: str) -> str:
        done = subprocess.run(
            [str(clean / "bin" / command[0]), *command[1:]], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert project["project"]["version"] in run("sgl-kvevict", "--version")
    assert "distilled" in run("sgl-kvevict", "policies")
    code = "import sgl_kvevict, kvevict_kernels; from importlib.metadata import entry_points as e; "
    code += (
        "from sgl_kvevict.sglang_adapter.plugin import register; print(sgl_kvevict.__file__, kvevict_kernels.__file__, "
    )
    code += "*(p.value for p in e(group='sglang.srt.plugins') if p.name == 'kvevict'))"
    *files, entry = run("python", "-c", code).split()
    assert [Path(file).parents[1] for file in files] == [packages] * 2
    assert entry == project["project"]["entry-points"]["sglang.srt.plugins"]["kvevict"]


def test_the_changelog_has_a_section_of_this_version(project):
    assert notes.version() == project["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    date, text = notes.section(changelog, notes.version())
    assert date == "not released yet" or re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
    assert "### Added" in text and "\n## " not in text


def test_without_the_tools_of_a_checkout_the_command_runs_and_says_what_is_missing(tmp_path):
    """As from a wheel."""
    hide = "import sys; sys.path = [p for p in sys.path if not p.endswith('/tools')]; "
    code = "from sgl_kvevict.cli.model_names import unknown_model; import importlib.util as u; "
    code += "print(u.find_spec('kvevict_tools'), unknown_model('demo'))"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", hide + code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.startswith("None model: got 'demo', no such folder;"), done.stderr
    assert "`make model` of a checkout puts the demo model (now: none)" in done.stdout


def test_requirement_files_are_exact_pins_without_addresses():
    seen: set[str] = set()
    for name in REQUIREMENTS:
        for line in requirement_lines(name):
            match = PIN.match(line)
            assert match, f"requirements/{name}.txt: {line!r} is not an exact pin"
            assert normalised(match["name"]) not in seen, f"requirements/{name}.txt: {line!r} is pinned twice"
            seen.add(normalised(match["name"]))
    everything = "".join(path.read_text() for path in (ROOT / "requirements").iterdir())
    assert "://" not in everything


def test_the_supported_versions_of_sglang_are_the_same_everywhere(project):
    first, newest = SUPPORTED_SGLANG[0], SUPPORTED_SGLANG[-1]
    assert pins()["sglang"] == newest
    allowed = f"sglang=={newest}" if first == newest else f"sglang>={first},<={newest}"
    assert project["project"]["optional-dependencies"]["gpu"] == [allowed]
    for name in ("README.md", "CHANGELOG.md", "docs/design.md", "docs/design/sglang.md"):
        assert f"SGLang {SGLANG_RANGE}" in (ROOT / name).read_text(encoding="utf-8"), name


def test_the_cpu_profile_pins_all_that_the_project_file_names(project):
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    wanted = {normalised(re.split(r"[\[<>=]", requirement)[0]) for group in groups for requirement in group}
    assert wanted - {"sgl-kvevict"} <= set(pins())
