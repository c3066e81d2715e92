"""A file imports only from lower layers, and a third-party package only where it belongs (docs/design.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"sgl_kvevict": ROOT / "sgl_kvevict", "kvevict_kernels": ROOT / "kernels" / "kvevict_kernels"}

KERNELS = "kvevict_kernels"
BASE = {
    "errors",
    "guard",
    "geometry",
    "ragged",
    "copies",
    "config",
    "config_file",
    "fields",
    "request",
    "cache_report",
    "long_prompts",
    "widths",
}
MACHINE, SUPPORT = "machine", "support"
TOP = {"cli", "client"}
BELOW_TOP = {
    *(KERNELS, "events", "policies", "distill", "attention", "segments", "store", "cache"),
    *("sglang_adapter", MACHINE, SUPPORT),
    *BASE,
}
# Part of the project -> other parts that it may import. A new module or package needs a row here.
MAY_IMPORT = {
    KERNELS: set(),
    **dict.fromkeys(BASE, BASE),
    MACHINE: {KERNELS} | BASE,
    "events": BASE,
    "policies": {KERNELS} | BASE,
    "distill": {KERNELS, "policies"} | BASE,
    SUPPORT: {MACHINE} | BASE,
    "attention": {KERNELS, MACHINE, SUPPORT} | BASE,
    "store": {"events"} | BASE,
    "segments": {KERNELS, "policies", "distill", "attention"} | BASE,
    "cache": {KERNELS, "events", "policies", "distill", "segments", "store"} | BASE,
    "sglang_adapter": BELOW_TOP - {"sglang_adapter"},
    **dict.fromkeys(TOP, BELOW_TOP | TOP),
}
# Third-party package -> the only places (path prefixes below a source folder) that may import it.
ONLY_IN = {
    "sglang": ("sgl_kvevict/sglang_adapter/",),
    "flashinfer": ("sgl_kvevict/attention/flashinfer/",),
    "pydantic": (
        *("sgl_kvevict/config.py", "sgl_kvevict/fields.py", "sgl_kvevict/request.py", "sgl_kvevict/policies/"),
        "sgl_kvevict/cli/size.py",
    ),
    "yaml": ("sgl_kvevict/config_file.py",),
    "transformers": ("sgl_kvevict/cli/inspect",),
    "safetensors": ("sgl_kvevict/distill/files.py", "sgl_kvevict/store/segment_file.py"),
    "fsspec": ("sgl_kvevict/store/remote.py",),
    "typer": ("sgl_kvevict/cli/",),
    "rich": ("sgl_kvevict/cli/",),
    "zmq": ("sgl_kvevict/events/",),
    "msgspec": ("sgl_kvevict/events/", "sgl_kvevict/cli/", "sgl_kvevict/store/"),
    "uvloop": ("sgl_kvevict/cli/",),
    "prometheus_client": ("sgl_kvevict/sglang_adapter/monitoring/metrics.py",),
}
NEVER = {"tests", "tools", "kvevict_tools", "helpers", "benchmarks", "examples", "pytest", "hypothesis", "matplotlib"}


def imported_modules(tree: ast.AST, package: str) -> Iterator[str]:
    """Absolute names of all modules imported in ``tree``; blocks of ``TYPE_CHECKING`` do not count."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for node in tree.orelse:
            yield from imported_modules(node, package)
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        parents = package.split(".")[: len(package.split(".")) - tree.level + 1] if tree.level else []
        module = ".".join([*parents, *([tree.module] if tree.module else [])])
        # `from package import module` may name a module: both readings are checked.
        yield from (f"{module}.{alias.name}" for alias in tree.names)
    for child in ast.iter_child_nodes(tree):
        yield from imported_modules(child, package)


def part_of(module: str) -> str | None:
    """The part of the project that a module belongs to; None for other packages, and for the top one."""
    names = module.split(".")
    if names[0] == KERNELS:
        return KERNELS
    return names[1] if names[0] == "sgl_kvevict" and len(names) > 1 else None


def violations(relative: str, source: str) -> list[str]:
    """What breaks the rules in a file at ``relative`` ("sgl_kvevict/segments/segment.py")."""
    path = Path(relative)
    names = [*path.parts[:-1], *([path.stem] if path.stem != "__init__" else [])]
    package = ".".join(path.parts[:-1])
    own = part_of(".".join(names))
    if own is not None and own not in MAY_IMPORT:
        return [f"{relative}: {own} has no layer; add it to MAY_IMPORT"]
    problems = []
    for module in imported_modules(ast.parse(source), package):
        top, part = module.split(".")[0], part_of(module)
        if part in MAY_IMPORT and part != own and part not in MAY_IMPORT.get(own or KERNELS, set()):
            problems.append(f"{relative}: {own or 'the top package'} may not import {part}")
        if top == "triton" and not (own == KERNELS and path.name.startswith("triton_")):
            problems.append(f"{relative}: triton belongs in triton_*.py")
        if top in ("numba", "llvmlite") and not (own == KERNELS and path.name.startswith("numba_")):
            problems.append(f"{relative}: {top} belongs in numba_*.py")
        if top in ONLY_IN and not relative.startswith(ONLY_IN[top]):
            problems.append(f"{relative}: {top} belongs in {' or '.join(ONLY_IN[top])}")
        if top in NEVER:
            problems.append(f"{relative}: {top} is not for the product")
        if module.startswith("sgl_kvevict") and own == KERNELS:
            problems.append(f"{relative}: kernels know nothing of the plugin")
    return list(dict.fromkeys(problems))


def test_every_file_keeps_the_rules() -> None:
    problems: list[str] = []
    num_files = 0
    for name, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            num_files += 1
            problems += violations(f"{name}/{path.relative_to(folder).as_posix()}", path.read_text())
    assert num_files > 20
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("sgl_kvevict/segments/segment.py", "from sgl_kvevict.cache.records import PrefixTable"),
        ("sgl_kvevict/segments/segment.py", "from sgl_kvevict import cache"),
        ("sgl_kvevict/segments/segment.py", "from ..store import host"),
        ("sgl_kvevict/policies/by_name.py", "from sgl_kvevict.attention.cpu.torch_attention import TorchAttention"),
        ("sgl_kvevict/attention/batch.py", "import sgl_kvevict.policies.by_name"),
        ("sgl_kvevict/attention/batch.py", "def f():\n    import flashinfer"),
        ("sgl_kvevict/segments/ranker.py", "import sglang.srt.mem_cache"),
        ("sgl_kvevict/segments/ranker.py", "from sgl_kvevict.sglang_adapter import tree"),
        ("sgl_kvevict/cache/resize.py", "from sgl_kvevict.sglang_adapter import tree"),
        ("sgl_kvevict/cache/resize.py", "from sglang.srt.managers.schedule_batch import Req"),
        ("sgl_kvevict/segments/ranker.py", "from sgl_kvevict.cache import PrefixCache"),
        ("sgl_kvevict/cli/__init__.py", "from sglang.srt import server_args"),
        ("sgl_kvevict/geometry.py", "from kvevict_kernels.compact_kv import compact_kv"),
        ("sgl_kvevict/ragged.py", "import triton"),
        ("sgl_kvevict/unheard_of.py", ""),
        ("sgl_kvevict/__init__.py", "from sgl_kvevict.cli import main"),
        ("kvevict_kernels/compact_kv/__init__.py", "import triton"),
        ("kvevict_kernels/span_attention/call.py", "import numba"),
        ("sgl_kvevict/attention/cpu/numba_attention.py", "from numba import njit"),
        ("kvevict_kernels/compact_kv/__init__.py", "from sgl_kvevict import geometry"),
        ("kvevict_kernels/compact_kv/__init__.py", "from sgl_kvevict.errors import KVEvictError"),
        ("sgl_kvevict/cli/learn.py", "from kvevict_tools.measure import flush"),
        ("sgl_kvevict/cli/size.py", "from helpers.tolerance import check"),
    ],
)
def test_a_breach_is_found(relative: str, source: str) -> None:
    assert len(violations(relative, source)) >= 1


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("sgl_kvevict/segments/segment.py", "from sgl_kvevict.ragged import Selection\nfrom .store import x"),
        ("sgl_kvevict/attention/flashinfer/lists.py", "def f():\n    import flashinfer"),
        ("sgl_kvevict/config.py", "from sgl_kvevict.errors import ConfigError\nimport pydantic"),
        ("sgl_kvevict/policies/parts.py", "if TYPE_CHECKING:\n    from sgl_kvevict.attention import x"),
        ("kvevict_kernels/compact_kv/triton_impl.py", "import triton.language as tl"),
        ("kvevict_kernels/ragged_decode/triton_merge.py", "import triton"),
        ("kvevict_kernels/span_attention/numba_impl.py", "from numba import njit\nfrom llvmlite import ir"),
        ("sgl_kvevict/sglang_adapter/tree.py", "from sglang.srt.mem_cache.radix_cache import RadixKey"),
        ("sgl_kvevict/cache/resize.py", "from sgl_kvevict.segments import Compressor"),
        ("sgl_kvevict/cli/__init__.py", "from sgl_kvevict.policies.by_name import list_policies"),
    ],
)
def test_a_legal_import_passes(relative: str, source: str) -> None:
    assert violations(relative, source) == []


def test_no_circles_within_a_package() -> None:
    """What imports each other, if only for types, cannot be read one after the other."""
    graph: dict[str, set[str]] = {}
    root = SOURCES["sgl_kvevict"]
    for path in sorted(root.rglob("*.py")):
        parts = ["sgl_kvevict", *path.relative_to(root).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        imports = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
        graph[name] = {node.module for node in imports if node.module is not None} - {name}
    circles = [cycle for cycle in circles_of(graph) if len(cycle) > 1]
    assert not circles, "\n".join(" <-> ".join(sorted(circle)) for circle in circles)


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for folder in SOURCES.values():
        for path in sorted(folder.rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def circles_of(graph: dict[str, set[str]]) -> list[set[str]]:
    """Modules that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        rest = [start]
        while rest:
            new = graph.get(rest.pop(), set()) & graph.keys() - seen
            seen |= new
            rest.extend(new)
        return seen

    reach = {name: reached(name) for name in graph}
    return [{name, *(other for other in reach[name] if name in reach[other])} for name in graph if name in reach[name]]
