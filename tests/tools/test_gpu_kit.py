"""The kit for a machine without a network: pruned libraries, packed and unpacked parts, and the order of a run."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_kit import packing, run, unpack
from gpu_kit.fatbin import ENTRY, HEADER, MAGIC, fatbins, find_section, prune
from gpu_kit.run import CALLS, DIFFERS, DONE, GIVE_BACK, NO_TIME, Step, follow

ROOT = Path(__file__).resolve().parents[2]


def entry(arch: int, code: bytes, kind: int = 2) -> bytes:
    header = 64
    return ENTRY.pack(kind, 0x101, header, len(code), 0, 0, 0, 0, arch).ljust(header, b"\0") + code


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return HEADER.pack(MAGIC, 1, 16, len(body)) + body


def library(section: bytes, name: str = ".nv_fatbin") -> bytes:
    """An ELF file with one section beside that of names."""
    names = b"\0.shstrtab\0" + name.encode() + b"\0"
    start, head = 64, struct.Struct("<IIQQQQIIQQ")
    table = start + len(section) + len(names)
    elf = b"\x7fELF\x02\x01\x01".ljust(0x28, b"\0") + struct.pack("<Q", table)
    elf = elf.ljust(0x3A, b"\0") + struct.pack("<HHH", head.size, 3, 1)
    assert len(elf) == start
    heads = [
        head.pack(0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        head.pack(1, 3, 0, 0, start + len(section), len(names), 0, 0, 1, 0),
        head.pack(11, 1, 2, 0, start, len(section), 0, 0, 8, 0),
    ]
    return elf + section + names + b"".join(heads)


SMALL = fatbin(entry(80, b"x" * 8))
MIXED = fatbin(entry(80, b"old" * 40), entry(90, b"wanted" * 20), entry(90, b"ptx." * 30, kind=1))
OTHER = fatbin(entry(80, b"old" * 40), entry(100, b"new." * 30))


def test_only_machine_code_of_one_architecture_stays():
    data = library(MIXED + bytes(8) + OTHER)
    result = prune(data, 90, SMALL)
    assert (result.kept, result.dropped, len(result.data)) == (1, 1, len(data))
    kept, dropped = fatbins(result.data)
    assert [(part.arch, part.is_machine_code) for part in kept.entries] == [(90, True)]
    assert [part.arch for part in dropped.entries] == [80], "a kernel of it says 'no kernel image' when launched"
    (wanted,) = kept.entries
    assert result.data[wanted.start + 64 :][:120] == b"wanted" * 20
    assert b"old" not in result.data and b"ptx." not in result.data and b"new." not in result.data
    first, length = find_section(data)
    assert result.data[:first] == data[:first] and result.data[first + length :] == data[first + length :]


def test_a_fatbin_with_unwanted_code_is_dropped():
    data = library(fatbin(entry(90, b"float16." * 16)) + fatbin(entry(90, b"bfloat16" * 16)))
    result = prune(data, 90, SMALL, lambda code: code.startswith(b"bfloat16"))
    assert (result.kept, result.dropped) == (1, 1)
    assert b"bfloat16" in result.data and b"\0float16" not in result.data


def test_a_file_of_zeros_is_packed_without_them(tmp_path):
    data = b"a" * 100 + bytes(5 * packing.BLOCK) + b"b" * packing.BLOCK + b"tail" + bytes(3 * packing.BLOCK + 7)
    tree, target = tmp_path / "tree", tmp_path / "target"
    packing.write_extents(data, tree / "site" / "library.so")
    (tree / "README").write_text("text")
    packing.pack(tree, tmp_path / "a.tar.xz")
    packing.pack(tree, tmp_path / "b.tar.xz")
    assert (tmp_path / "a.tar.xz").read_bytes() == (tmp_path / "b.tar.xz").read_bytes()
    assert sum(path.stat().st_size for path in tree.rglob("*.extents")) <= 4 * packing.BLOCK
    packing.extract(tmp_path / "a.tar.xz", target)
    assert (target / "site" / "library.so").read_bytes() == data
    assert sorted(path.name for path in target.rglob("*") if path.is_file()) == ["README", "library.so"]


@pytest.fixture
def parts(tmp_path):
    """A folder with one part and its checksum."""
    tree, folder = tmp_path / "tree", tmp_path / "parts"
    folder.mkdir()
    (tree / "site" / "sglang").mkdir(parents=True)
    (tree / "site" / "sglang" / "__init__.py").write_text("x = 1\n")
    (tree / "DIFFERENCES.txt").write_text("- torch 2.11\n")
    packing.pack(tree, folder / "sglang.tar.xz")
    packing.write_sums(folder)
    return folder


def test_parts_are_unpacked_once_and_the_environment_is_written(parts, tmp_path, capsys):
    kit = tmp_path / "kit"
    assert unpack.main([str(parts), "--kit", str(kit)]) == 0
    assert (kit / "site" / "sglang" / "__init__.py").read_text() == "x = 1\n"
    assert (kit / "site" / "sglang" / "__pycache__").is_dir(), "processes of a server would compile it each"
    told = capsys.readouterr().out
    assert "- torch 2.11" in told and "unpacked sglang.tar.xz" in told
    (kit / "site" / "sglang" / "__init__.py").write_text("x = 2\n")
    assert unpack.main([str(parts), "--kit", str(kit)]) == 0
    assert (kit / "site" / "sglang" / "__init__.py").read_text() == "x = 2\n"
    assert "unpacked nothing new" in capsys.readouterr().out
    script = f". {kit}/env.sh && echo $PYTHONPATH $SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown == f"{kit / 'site'}:{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tools'} python\n"


def test_a_damaged_part_is_named_and_not_unpacked(parts, tmp_path, capsys):
    (parts / "sglang.tar.xz").write_bytes((parts / "sglang.tar.xz").read_bytes() + b"x")
    assert unpack.main([str(parts), "--kit", str(tmp_path / "kit")]) == 1
    assert "sglang.tar.xz is damaged: its checksum is" in capsys.readouterr().err
    assert not (tmp_path / "kit" / "site").exists()


def test_a_model_in_pieces_is_joined_where_it_is_looked_for(tmp_path, monkeypatch):
    from kvevict_tools import models
    from sgl_kvevict.cli.model_names import models_dir

    folder = tmp_path / "parts"
    folder.mkdir()
    for i, text in enumerate((b"GG", b"UF", b"!")):
        (folder / f"smollm2-{i + 1}.gguf-part").write_bytes(text)
    packing.write_sums(folder)
    kit = tmp_path / "kit"
    unpack.unpack(folder, kit)
    unpack.join_model(kit)
    monkeypatch.setenv("XDG_CACHE_HOME", str(kit / "cache"))
    known = models.MODELS[models.DEMO]
    assert (models_dir() / f".{known.folder}.parts" / "000").read_bytes() == b"GGUF!"
    assert list((kit / "smollm2").iterdir()) == []


def test_a_kernel_that_does_not_load_is_looked_up_as_usual(tmp_path):
    """SGLang looks a second time when what was found does not load; then the kit is not asked again."""
    spec = importlib.util.spec_from_file_location("kit_site", ROOT / "tools" / "gpu_kit" / "site" / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    site: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    (tmp_path / "rope.so").touch()
    loader = SimpleNamespace(_find_prebuilt=lambda *, spec, scope: "usual")
    site.PrebuiltFinder(str(tmp_path)).install(loader)
    asked = [loader._find_prebuilt(spec=SimpleNamespace(module_name=name), scope=None) for name in ("rope", "norm")]
    assert asked == [tmp_path / "rope.so", "usual"]
    assert loader._find_prebuilt(spec=SimpleNamespace(module_name="rope"), scope=None) == "usual"


class Machine:
    """Runs the steps of a call in no time; the clock moves by what they take."""

    def __init__(self, seconds: float, codes: dict[str, list[int]] | None = None, takes: float = 10.0) -> None:
        self.left, self.codes, self.takes = seconds, codes or {}, takes
        self.begun: list[tuple[str, bool]] = []

    def run(self, step: Step, seconds: float, graphs: bool) -> int:
        self.begun.append((step.name, graphs))
        self.left -= self.takes
        return (self.codes.get(step.name) or [0]).pop(0)

    def follow(self, call: str = "servers") -> int:
        return follow(CALLS[call], self.run, lambda: self.left, lambda step: True, graphs=True)


def test_a_call_fits_its_seconds():
    """Three are 25 minutes, and each step can be begun unless others take what they may; else it is not begun."""
    assert 3 * run.SECONDS <= 25 * 60
    for call, steps in CALLS.items():
        assert Machine(run.SECONDS, takes=run.SECONDS / len(steps) - 15.0).follow(call) == DONE
    machine = Machine(165.0, takes=20.0)
    assert machine.follow() == NO_TIME
    assert [name for name, _ in machine.begun] == ["unpack", "smoke", "answers", "ours"]


@pytest.mark.parametrize(("step", "codes"), [("unpack", [1]), ("smoke", [2]), ("answers", [3, 3])])
def test_the_machine_is_given_back_where_no_server_can_answer(step, codes):
    machine = Machine(1000.0, {step: [*codes]})
    assert machine.follow() == GIVE_BACK
    assert machine.begun[-1] == (step, len(codes) == 1)


def test_a_first_server_that_does_not_start_gets_one_try_without_graphs():
    machine = Machine(1000.0, {"answers": [3, 0]})
    assert machine.follow() == DONE
    assert machine.begun[2:5] == [("answers", True), ("answers", False), ("ours", False)]


def test_what_a_call_finds_is_compared_with_what_is_expected(tmp_path, monkeypatch, capsys):
    """The real command line, with steps that only say something, after rows of a server."""
    kit, out, expected = tmp_path / "kit", tmp_path / "out", tmp_path / "expected.txt"
    rows = kit / "results" / "ours-full" / "rows.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text(
        '{"what": "run"}\n{"what": "decode 8", "system": "budget 1.0", "tokens_s": 7.0}\n'
        '{"what": "leaks", "system": "budget 1.0", "leaks": 0}\n'
    )
    expected.write_text("smoke: exit code 0\nours-full: budget 1.0, decode\nours-full: budget 1.0, leaks, leaks 1\n")
    monkeypatch.setattr(run, "EXPECTED", expected)
    monkeypatch.setattr(run, "command_of", lambda step, *args, **kwargs: f"echo said {step.name}")
    assert run.main([str(tmp_path), "rest", "--kit", str(kit), "--out", str(out)]) == DIFFERS
    told = [line for line in capsys.readouterr().out.splitlines() if "smoke: " in line or "budget" in line]
    assert told == [f"run: {sign} ours-full: budget 1.0, leaks, leaks {count}" for sign, count in ("-1", "+0")]
    assert "said mixed\n" in (out / "run.log").read_text()
    assert len((out / "rows.jsonl").read_text().splitlines()) == 3
    assert {path.name for path in out.iterdir()} == {"run.log", "rows.jsonl", "found.txt", "logs.tar.xz"}
