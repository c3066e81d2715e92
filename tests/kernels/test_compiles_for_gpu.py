"""The kernels pass the real compiler, checked without a GPU; all architectures and head_dims: ``make test-compile``."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.compiled import Spec, compile_all
from helpers.gpu_kernels import DEVICES, attention_kernels, few_bits_kernels, head_dim_kernels, label, small_kernels
from helpers.sass import Instruction, copies_in_flight

H100 = DEVICES[90]
Compiled = dict[str, dict[str, Any]]


def compiled(specs: list[Spec], folder: Path) -> Compiled:
    """What the compiler makes of each kernel, by its label."""
    return {label(spec): result for spec, result in zip(specs, compile_all(specs, str(folder)), strict=True)}


@pytest.fixture(scope="module")
def attention_of_h100(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compiled(list(attention_kernels(90, 128)), tmp_path_factory.mktemp("triton"))


@pytest.mark.slow
def test_attention_kernels_compile_for_an_h100(attention_of_h100: Compiled) -> None:
    """Tensor cores, 16-byte loads, copies that run beside the products; the interpreter says nothing about these."""
    found = attention_of_h100
    loops = [found[name] for name in ("split, 16 q rows", "split, 128 q rows", "extend, 128 q rows")]
    for result in loops:
        assert result["in_flight"] >= 3, "the next K, V and indices are on their way while products run"
        assert "mma" in result["ptx"]
        assert "ld.global.v4.b32" in result["ptx"]
        assert "st.global.v4.b32" in result["ptx"], "partials, whose address the kernel loads"
    for result in loops[:2]:
        assert result["loads_before_keys"] == 3, "list of addresses, work item, index; not the number of items besides"
    for result in found.values():
        assert result["stack"] == 0
        assert result["shared"] <= H100.shared_per_block
    decode = loops[0]
    resident = H100.programs_per_sm(registers=decode["registers"], shared=decode["shared"], num_warps=decode["warps"])
    assert resident == 4


@pytest.mark.slow
def test_the_merge_starts_beside_the_split_kernel_from_sm_90_on(tmp_path: Path, attention_of_h100: Compiled) -> None:
    """Others do not know the instructions."""
    names = ("split, 16 q rows", "merge")
    specs = [spec for spec in attention_kernels(80, 64) if label(spec) in names]
    for found, can in ((compiled(specs, tmp_path), False), (attention_of_h100, True)):
        split, merge = (found[name]["ptx"] for name in names)
        assert ("griddepcontrol.launch_dependents" in split) == can
        assert ("griddepcontrol.wait" in merge) == can
        if can:
            before, _, after = merge.partition("griddepcontrol.wait")
            copy = "cp.async.cg.shared.global"
            assert copy not in before and copy in after, "partials are read after the wait"
            assert found["merge"]["loads_behind_wait"] == 2, "a block of partials, then the next one; places are known"


@pytest.mark.slow
def test_kernels_of_a_compression_compile_for_an_h100(tmp_path: Path) -> None:
    specs = [*head_dim_kernels(90, 128), *small_kernels(90)]
    for spec, result in zip(specs, compile_all(specs, str(tmp_path)), strict=True):
        name = label(spec)
        assert result["stack"] == 0, name
        if name in ("gather", "gather_sum", "write"):
            assert "ld.global.v4.b32" in result["ptx"] and "st.global.v4.b32" in result["ptx"], name
            assert "global.b16" not in result["ptx"], name
        if name.startswith("key_scores"):
            assert "mma" in result["ptx"], name
        assert not re.search(r"\s(atom|red)\.global", result["ptx"]), name


@pytest.mark.slow
def test_kernels_for_rows_of_few_bits_compile_for_an_h100(tmp_path: Path) -> None:
    """Rows of all widths are loaded in words of 16 bytes, ahead of the products."""
    found = compiled(list(few_bits_kernels(90, 128)), tmp_path)
    for name, result in found.items():
        assert result["stack"] == 0, name
        assert result["shared"] <= H100.shared_per_block, name
        assert not re.search(r"\s(atom|red)\.global", result["ptx"]), name
        if name.startswith(("split", "extend")):
            assert "mma" in result["ptx"], name
            assert result["in_flight"] >= 3, name
            assert "cvt.rn.f32.u" not in result["ptx"], f"{name}: few lanes convert integers"


def test_the_wait_is_read_from_the_innermost_loop_with_products() -> None:
    lines = [
        "DEPBAR.LE SB0, 0x0",
        "DEPBAR.LE SB0, 0x1",
        "DEPBAR.LE SB0, 0x4",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        "DEPBAR.LE SB0, 0x3",
        "@P1 BRA 0x20",
        "DEPBAR.LE SB0, 0x0",
        "@P2 BRA 0x10",
        "EXIT",
    ]
    code = [Instruction(16 * i, text) for i, text in enumerate(lines)]
    assert copies_in_flight(code) == 3
    assert copies_in_flight([replace(one, text=one.text.replace("HMMA", "FFMA")) for one in code]) is None
