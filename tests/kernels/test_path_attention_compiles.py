"""The kernels of ragged_decode and ragged_extend pass the real compiler; their results are in tests/attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.hopper import ptx_of

DECODE = "kvevict_kernels.ragged_decode.triton_impl:"
MERGE = "kvevict_kernels.ragged_decode.merge.triton_impl:"
EXTEND = "kvevict_kernels.ragged_extend.triton_impl:"

ROWS = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16")
SIZES: dict[str, Any] = {"H": 8, "G": 4, "D": 128, "BLOCK_D": 128}
INT32 = (
    *("work_unit_ptr", "run_lens_ptr", "span_members_ptr", "span_member_start_ptr", "members_ptr", "requests_ptr"),
    *("suffix_work_ptr", "suffix_work_start_ptr", "request_members_ptr", "new_lens_ptr", "waterlines_ptr"),
    *("seq_lens_ptr", "request_chunk_ptr", "path_start_ptr", "path_span_ptr", "path_member_ptr", "span_chunk_ptr"),
    *("merge_request_ptr", "merge_token_ptr", "tile_request_ptr", "tile_index_ptr"),
    *("work_ptr", "work_start_ptr"),
)
INT64 = (
    *("layer_start_ptr", "item_start_ptr", "run_address_ptr", "partial_start_ptr"),
    *("pool_rows_ptr", "suffix_partial_ptr"),
)
SCALARS = {"layer": "i32", "num_spans": "i32", "num_requests": "i32", "req_to_token": "i64", "row_stride": "i32"}
SCALARS |= {"num_token_slots": "i32", "scale_log2": "fp32"}
POINTERS = dict.fromkeys(INT32, "*i32") | dict.fromkeys(INT64, "*i64") | ROWS | SCALARS
PARTIALS = {"partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32"}
COMMON = POINTERS | PARTIALS | SIZES | {"entries_ptr": "*i64"}


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Tensor cores, 16-byte loads, and loads that run ahead; the interpreter says nothing about these."""
    blocks = {"BLOCK_N": 64, "UPCAST": False, "MAX_SPLITS": 32}
    split = {"kernel": DECODE + "_split_kernel", "args": COMMON | blocks}
    specs: list[dict[str, Any]] = [
        {**split, "args": split["args"] | {"BLOCK_M": rows, "CHUNK": chunk, "CLASS": which}}
        for which, (rows, chunk) in enumerate(((16, 512), (64, 1024)))
    ]
    specs.append({"kernel": EXTEND + "_extend_kernel", "args": COMMON | blocks | {"BLOCK_M": 128}})
    specs.append({"kernel": MERGE + "_merge_kernel", "args": COMMON | {"MAX_SPLITS": 32, "BLOCK": 16}})
    counting = {"CLASS": 0, "CHUNK": 512, "ROW_TILE": 16, "MAX_SPLITS": 32, "BLOCK": 64, "FILL": 128}
    specs.append({"kernel": DECODE + "_suffix_work_kernel", "args": COMMON | counting})
    codes = ptx_of(specs, str(tmp_path))
    for code in codes[:3]:
        assert "mma" in code
        assert "cp.async" in code
        assert "ld.global.v4.b32" in code
    for code in codes[:2]:
        assert "st.global.v4.b32" in code, "partials, whose address the kernel loads"
