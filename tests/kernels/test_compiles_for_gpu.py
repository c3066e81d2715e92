"""The kernels pass the real compiler and move rows 16 bytes at a time, checked without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.hopper import ptx_of

ALLOC = "kvevict_kernels.alloc_head_slots.triton_impl:"
COMPACT = "kvevict_kernels.compact_kv.triton_impl:"
SELECT = "kvevict_kernels.radix_select.triton_impl:"
WINDOW = "kvevict_kernels.window_scores.triton_impl:"

MOVE = {
    "rows_ptr": "*bf16",
    "staging_ptr": "*bf16",
    "src_ptr": "*i32",
    "dst_ptr": "*i32",
    "indptr_ptr": "*i32",
    "staged_ptr": "*i8",
}
MOVE |= {"weights_ptr": "*fp32", "num_out": "i32"}
MOVE_SIZES: dict[str, Any] = {"first_column": 0, "HEAD_DIM": 128, "WIDTH": 128, "BLOCK_D": 128, "BLOCK": 64}
SCORES = {
    "q_ptr": "*bf16",
    "lse_ptr": "*fp32",
    "k_ptr": "*bf16",
    "token_slots_ptr": "*i64",
    "pooled_ptr": "*fp32",
}
SCORES |= {"mean_ptr": "*fp32", "num_keys": "i32", "first_key": "i32", "sm_scale": "fp32", "W": "i32"}
SCORES_SIZES: dict[str, Any] = {"H": 8, "G": 4, "D": 128, "BLOCK_R": 32, "BLOCK_D": 128, "UPCAST": False}


def scores(kernel_size: int, block: int) -> dict[str, Any]:
    pooling = {"KERNEL": kernel_size, "NUM_DOUBLINGS": (kernel_size - 1).bit_length(), "BLOCK_N": block}
    return {"kernel": WINDOW + "_window_scores_kernel", "args": SCORES | SCORES_SIZES | pooling}


@pytest.mark.slow
def test_kernels_compile_and_move_16_bytes_at_a_time(tmp_path: Path) -> None:
    slots = {
        "token_slots_ptr": "*i64",
        "head_slots_ptr": "*i32",
        "num_entries": "i32",
        "num_token_slots": "i32",
    }
    slots |= {"num_kv_heads": "i32", "entries_per_layer": "i32"}
    lens = {"lens_ptr": "*i32", "indptr_ptr": "*i32", "num_runs": "i32"}
    specs: list[dict[str, Any]] = [
        {"kernel": ALLOC + "_indptr_kernel", "args": {**lens, "BLOCK": 1024}},
        {"kernel": ALLOC + "_head_slots_kernel", "args": {**slots, "BLOCK": 1024}},
        scores(1, 128),
        scores(7, 128),
        scores(127, 256),
        *(
            {"kernel": COMPACT + name, "args": MOVE | MOVE_SIZES}
            for name in ("_gather_kernel", "_gather_sum_kernel", "_write_kernel")
        ),
    ]
    codes = ptx_of(specs, str(tmp_path))
    assert "mma" in codes[3]
    for code in codes[-3:]:
        assert "ld.global.v4.b32" in code
        assert "st.global.v4.b32" in code
        assert "global.b16" not in code


def selection(key_bits: int) -> list[dict[str, Any]]:
    keys, sign = f"*u{key_bits}", 1 << (key_bits - 1)
    rows = {"histograms_ptr": "*i32", "remaining_ptr": "*i64", "num_tiles": "i32", "BINS": 256}
    tiles = rows | {"keys_ptr": keys, "n": "i32", "tile_keys": "i32", "SIGN": sign, "BLOCK": 2048}
    return [
        {"kernel": SELECT + "_histogram_kernel", "args": tiles | {"prefix_ptr": keys, "shift": "i32"}},
        {"kernel": SELECT + "_pick_kernel", "args": rows | {"prefix_ptr": keys, "BLOCK": 32}},
        {
            "kernel": SELECT + "_mask_kernel",
            "args": tiles | {"threshold_ptr": keys, "mask_ptr": "*i1", "MAX_TILES": 256},
        },
    ]


@pytest.mark.slow
def test_radix_select_compiles_without_atomics_in_global_memory(tmp_path: Path) -> None:
    for code in ptx_of(selection(32) + selection(64), str(tmp_path)):
        assert ".entry" in code
        assert "atom.global" not in code and "red.global" not in code
