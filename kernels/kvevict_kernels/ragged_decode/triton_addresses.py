"""How a kernel reads a :class:`~kvevict_kernels.ragged_decode.addresses.TableAddresses`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvevict_kernels.ragged_decode import addresses
from kvevict_kernels.ragged_decode.addresses import BATCH_FIELDS, CLASS_FIELDS, CLASS_SIZE


def _of_batch(name: str) -> tl.constexpr:
    return tl.constexpr(BATCH_FIELDS.index(name))


def _of_class(name: str) -> tl.constexpr:
    return tl.constexpr(len(BATCH_FIELDS) + CLASS_FIELDS.index(name))


RUN_ADDRESS = _of_batch("run_address")
RUN_LENS = _of_batch("run_lens")
PARTIAL_START = _of_batch("partial_start")
SPAN_MEMBERS = _of_batch("span_members")
SPAN_MEMBER_START = _of_batch("span_member_start")
SPAN_CHUNK = _of_batch("span_chunk")
SPAN_CAP = _of_batch("span_cap")
MEMBERS = _of_batch("members")
REQUEST_MEMBERS = _of_batch("request_members")
NEW_LENS = _of_batch("new_lens_device")
WATERLINES = _of_batch("waterlines")
REQUEST_CHUNK = _of_batch("request_chunk")
SUFFIX_PARTIAL = _of_batch("suffix_partial")
PATH_START = _of_batch("path_start")
PATH_SPAN = _of_batch("path_span")
PATH_MEMBER = _of_batch("path_member")
MERGE_REQUEST = _of_batch("merge_request")
MERGE_TOKEN = _of_batch("merge_token")
SPAN_POSITIONS = _of_batch("span_positions")
MEMBER_REQUEST = _of_batch("member_request")
ROW_ENDS = _of_batch("row_ends")
WORK_UNIT = _of_class("work_unit")
ITEM_START = _of_class("item_start")
ITEM_COUNT = _of_class("item_count")
REQUESTS = _of_class("requests")
MAX_ITEMS = tl.constexpr(len(BATCH_FIELDS) + len(CLASS_FIELDS))
PARTIAL_OUT = tl.constexpr(addresses.PARTIAL_OUT)
PARTIAL_LSE = tl.constexpr(addresses.PARTIAL_LSE)
NUM_SPANS = tl.constexpr(addresses.NUM_SPANS)
PER_CLASS = tl.constexpr(CLASS_SIZE)


@triton.jit
def int32s_at(addresses_ptr, ENTRY: tl.constexpr):
    """Pointer to a table of int32."""
    return tl.load(addresses_ptr + ENTRY).to(tl.pointer_type(tl.int32))


@triton.jit
def int64s_at(addresses_ptr, ENTRY: tl.constexpr):
    """Pointer to a table of int64."""
    return tl.load(addresses_ptr + ENTRY).to(tl.pointer_type(tl.int64))


@triton.jit
def floats_at(addresses_ptr, ENTRY: tl.constexpr):
    """Pointer to float32 scratch, which the allocator aligns."""
    return tl.multiple_of(tl.load(addresses_ptr + ENTRY).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def class_int32s_at(addresses_ptr, ENTRY: tl.constexpr, CLASS: tl.constexpr):
    """Pointer to a class's table of int32."""
    return int32s_at(addresses_ptr, ENTRY + CLASS * PER_CLASS)


@triton.jit
def max_items_of(addresses_ptr, CLASS: tl.constexpr):
    """Places per layer in a class's list of work items."""
    return tl.load(addresses_ptr + MAX_ITEMS + CLASS * PER_CLASS)
