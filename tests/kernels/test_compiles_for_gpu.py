"""The kernels pass the real compiler, checked without a GPU; all architectures and head_dims: ``make test-compile``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from helpers.compiled import Spec, compile_all, copies_in_flight
from helpers.gpu_kernels import DEVICES, attention_kernels, few_bits_kernels, head_dim_kernels, label, small_kernels

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
    ptx = """
    cp.async.wait_group 0;
$L__BB0_1:
    cp.async.wait_group 1;
$L__BB0_2:
    cp.async.wait_group 4;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {};
    cp.async.wait_group 3;
    @%p1 bra $L__BB0_2;
    cp.async.wait_group 0;
    @%p2 bra $L__BB0_1;
"""
    assert copies_in_flight(ptx) == 3
    assert copies_in_flight(ptx.replace("mma.sync", "fma.rn")) is None


def test_a_loop_whose_end_lies_before_its_head() -> None:
    ptx = """
$L__BB0_1:
    cp.async.wait_group 0;
    bra.uni $L__BB0_3;
$L__BB0_2:
    cp.async.wait_group 3;
    @!%p1 bra $L__BB0_5;
$L__BB0_3:
    cp.async.wait_group 4;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {};
    @%p2 bra $L__BB0_2;
    add.s32 %r1, %r2, %r3;
    bra.uni $L__BB0_2;
$L__BB0_5:
    @%p3 bra $L__BB0_1;
    ret;
"""
    assert copies_in_flight(ptx) == 3
