"""How kernels read a :class:`~kvevict_kernels.ragged_decode.addresses.TableAddresses`.

Indices into the list are constants of this module, named after the fields in capitals, e.g. ``at.RUN_LENS`` where the
module is imported as ``at``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvevict_kernels.ragged_decode.addresses import BATCH_FIELDS, CLASS_FIELDS, LAST_FIELDS, NUM_ADDRESSES

PER_CLASS = tl.constexpr(len(CLASS_FIELDS))
for _first, _names in (
    (0, (*BATCH_FIELDS, *CLASS_FIELDS)),  # of the first class; others are PER_CLASS places further each
    (NUM_ADDRESSES - len(LAST_FIELDS), LAST_FIELDS),
):
    globals().update({name.upper(): tl.constexpr(_first + i) for i, name in enumerate(_names)})
_MAX_ITEMS = tl.constexpr(len(BATCH_FIELDS) + CLASS_FIELDS.index("max_items"))

if TYPE_CHECKING:

    def __getattr__(name: str) -> tl.constexpr: ...


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
def class_int64s_at(addresses_ptr, ENTRY: tl.constexpr, CLASS: tl.constexpr):
    """Pointer to a class's table of int64."""
    return int64s_at(addresses_ptr, ENTRY + CLASS * PER_CLASS)


@triton.jit
def max_items_of(addresses_ptr, CLASS: tl.constexpr):
    """Places per layer in a class's list of work items."""
    return tl.load(addresses_ptr + _MAX_ITEMS + CLASS * PER_CLASS)
