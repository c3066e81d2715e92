"""Vector operations that numba's own loops do not compile to, as LLVM instructions.

Addresses and strides are integers; strides count float32 elements. A KV cache row has one of three kinds, given as a
literal: bfloat16 (numba has no such type), float16, float32. LLVM splits vectors that are too wide for the machine.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba.core import types
from numba.extending import intrinsic

from kvevict_kernels.row_codec import GROUP, MAX_CODE, MAX_NUMBER, MIDDLE

BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2

_HAS_AVX512 = bool(binding.get_host_cpu_features().get("avx512f", False))
LANES = 16 if _HAS_AVX512 else 8
"""Floats per vector."""
TILE_VECTORS = 4 if _HAS_AVX512 else 2
"""Vectors per row of a tile: with ``TILE_ROWS`` rows, sums and operands fit the machine's registers."""
TILE_ROWS = 4

_I64, _I32, _I16, _I8 = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_F32, _F16 = ir.FloatType(), ir.HalfType()
_FLOATS = ir.VectorType(_F32, LANES)
_INTS = ir.VectorType(_I32, LANES)
_SHORTS = ir.VectorType(_I16, LANES)
_HALVES = ir.VectorType(_F16, LANES)
_BYTES = ir.VectorType(_I8, LANES)
CODE_BYTES = GROUP // 2
"""Bytes of a group of codes, which are read at once."""
_CODES = ir.VectorType(_I8, CODE_BYTES)
_STORED = {BFLOAT16: _SHORTS, FLOAT16: _HALVES, FLOAT32: _FLOATS}

_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Cephes' expf: relative error below 2e-7 between -ln(2)/2 and ln(2)/2."""
_EXP_LOWEST = -87.0
"""Below it the exponential is 0 (it would be about 1e-38)."""


class _Code:
    """A thin layer over llvmlite's builder."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def at(self, address: Any, offset: int = 0) -> Any:
        return self.builder.add(address, ir.Constant(_I64, offset)) if offset else address

    def load(self, address: Any, kind: Any = _FLOATS) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=_align(kind))

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=_align(value.type))

    def widened(self, address: Any, kind: int) -> Any:
        """One vector of a cache row, as float32."""
        stored = self.load(address, _STORED[kind])
        if kind == BFLOAT16:
            return self.builder.bitcast(self.builder.shl(self.builder.zext(stored, _INTS), _ints(16)), _FLOATS)
        return self.builder.fpext(stored, _FLOATS) if kind == FLOAT16 else stored

    def units(self, codes: Any) -> tuple[Any, Any]:
        """Codes in the lower and in the upper halves of bytes, less that of the number 0."""
        builder = self.builder
        ints = builder.zext(codes, _INTS)
        halves = builder.and_(ints, _ints(MAX_CODE)), builder.lshr(ints, _ints(4))
        low, high = (builder.fsub(builder.sitofp(half, _FLOATS), _floats(MIDDLE)) for half in halves)
        return low, high

    def part_of(self, codes: Any, first: int) -> Any:
        """``LANES`` of ``CODE_BYTES`` bytes."""
        mask = ir.Constant(_INTS, [first + i for i in range(LANES)])
        return self.builder.shuffle_vector(codes, ir.Constant(_CODES, ir.Undefined), mask)

    def columns(self, rows: list[Any]) -> list[Any]:
        """Transpose ``LANES`` rows of ``CODE_BYTES`` bytes: ``CODE_BYTES`` columns of ``LANES``.

        Each step rotates the bits of a byte's number, its row's before its column's, by one.
        """
        half, lanes = LANES // 2, ir.VectorType(_I32, CODE_BYTES)
        masks = [
            ir.Constant(lanes, [first + i // 2 + CODE_BYTES * (i % 2) for i in range(CODE_BYTES)])
            for first in (0, CODE_BYTES // 2)
        ]
        for _ in range(LANES.bit_length() - 1):
            pairs = [(rows[i], rows[i + half]) for i in range(half)]
            rows = [self.builder.shuffle_vector(*pair, mask) for pair in pairs for mask in masks]
        return [self.part_of(row, first) for row in rows for first in range(0, CODE_BYTES, LANES)]

    def narrowed(self, value: Any, kind: int) -> Any:
        """Rounded to nearest, ties to even; NaN stays NaN."""
        builder = self.builder
        if kind == FLOAT16:
            return builder.fptrunc(value, _HALVES)
        if kind == FLOAT32:
            return value
        bits = builder.bitcast(value, _INTS)
        odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
        rounded = builder.lshr(builder.add(builder.add(bits, odd), _ints(0x7FFF)), _ints(16))
        is_nan = builder.fcmp_unordered("uno", value, value)
        return builder.trunc(builder.select(is_nan, _ints(0x7FC0), rounded), _SHORTS)

    def splat(self, value: Any) -> Any:
        first = self.builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_I32, 0))
        mask = ir.Constant(_INTS, [0] * LANES)
        return self.builder.shuffle_vector(first, ir.Constant(_FLOATS, ir.Undefined), mask)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        return self._call(f"llvm.fmuladd.v{LANES}f32", _FLOATS, a, b, c)

    def maximum(self, a: Any, b: Any) -> Any:
        """Element-wise maximum; ``b`` where ``a`` is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def minimum(self, a: Any, b: Any) -> Any:
        """Element-wise minimum; ``b`` where ``a`` is NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def size(self, a: Any) -> Any:
        """Element-wise absolute value."""
        return self._call(f"llvm.fabs.v{LANES}f32", _FLOATS, a)

    def floor(self, a: Any) -> Any:
        """Element-wise floor."""
        return self._call(f"llvm.floor.v{LANES}f32", _FLOATS, a)

    def pick(self, a: Any, b: Any, lanes: list[int]) -> Any:
        """Lanes of two vectors, those of the second from ``LANES`` on."""
        return self.builder.shuffle_vector(a, b, ir.Constant(_INTS, lanes))

    def halves(self, value: Any, combine: Any) -> Any:
        """Reduce to one float by combining halves."""
        width = LANES
        while width > 1:
            width //= 2
            mask = ir.Constant(_INTS, [(i + width) % LANES for i in range(LANES)])
            value = combine(value, self.builder.shuffle_vector(value, ir.Constant(_FLOATS, ir.Undefined), mask))
        return self.builder.extract_element(value, ir.Constant(_I32, 0))

    def exp(self, x: Any) -> Any:
        """Exponential of numbers <= 0."""
        builder = self.builder
        is_zero = builder.fcmp_ordered("<", x, _floats(_EXP_LOWEST))
        x = builder.select(is_zero, _floats(_EXP_LOWEST), x)
        n = self._call(f"llvm.rint.v{LANES}f32", _FLOATS, builder.fmul(x, _floats(_LOG2_E)))
        r = self.multiply_add(n, _floats(-_LN2_HIGH), x)
        r = self.multiply_add(n, _floats(-_LN2_LOW), r)
        series = _floats(_EXP_TERMS[0])
        for term in _EXP_TERMS[1:]:
            series = self.multiply_add(series, r, _floats(term))
        series = builder.fadd(self.multiply_add(builder.fmul(r, r), series, r), _floats(1.0))
        power = builder.shl(builder.add(builder.fptosi(n, _INTS), _ints(127)), _ints(23))
        return builder.select(is_zero, _floats(0.0), builder.fmul(series, builder.bitcast(power, _FLOATS)))

    def _call(self, name: str, result: Any, *args: Any) -> Any:
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [arg.type for arg in args]), name)
        return self.builder.call(function, args)


def _align(kind: Any) -> int:
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return {_I8: 1, _I16: 2, _F16: 2, _F32: 4, _I32: 4, _I64: 8}[element]


def _floats(value: float) -> Any:
    return ir.Constant(_FLOATS, [ir.Constant(_F32, value)] * LANES)


def _ints(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


@intrinsic(prefer_literal=True)
def multiply_tile(typing, rows, vectors, c, c_stride, a, a_stride, b, b_stride, depth):
    """``c[rows, vectors * LANES] += a[rows, depth] @ b[depth, vectors * LANES]``; sums stay in registers."""
    num_rows, num_vectors = rows.literal_value, vectors.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        c, c_stride, a, a_stride, b, b_stride, depth = args[2:]
        four = ir.Constant(_I64, 4)
        a_step, b_step = builder.mul(a_stride, four), builder.mul(b_stride, four)
        c_step = builder.mul(c_stride, four)
        c_rows = [builder.add(c, builder.mul(c_step, ir.Constant(_I64, r))) for r in range(num_rows)]
        a_rows = [builder.add(a, builder.mul(a_step, ir.Constant(_I64, r))) for r in range(num_rows)]
        places = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
        initial = {(r, v): code.load(code.at(c_rows[r], 4 * LANES * v)) for r, v in places}
        before = builder.block
        loop, after = builder.append_basic_block("depth"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", depth, ir.Constant(_I64, 0)), loop, after)

        builder.position_at_end(loop)
        i = builder.phi(_I64)
        sums = {place: builder.phi(_FLOATS) for place in places}
        b_row = builder.add(b, builder.mul(i, b_step))
        columns = [code.load(code.at(b_row, 4 * LANES * v)) for v in range(num_vectors)]
        shift = builder.mul(i, four)
        next_sums = {}
        for r in range(num_rows):
            factor = code.splat(code.load(builder.add(a_rows[r], shift), _F32))
            for v in range(num_vectors):
                next_sums[r, v] = code.multiply_add(factor, columns[v], sums[r, v])
        following = builder.add(i, ir.Constant(_I64, 1))
        i.add_incoming(ir.Constant(_I64, 0), before)
        i.add_incoming(following, loop)
        for place in places:
            sums[place].add_incoming(initial[place], before)
            sums[place].add_incoming(next_sums[place], loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)

        builder.position_at_end(after)
        for r, v in places:
            total = builder.phi(_FLOATS)
            total.add_incoming(initial[r, v], before)
            total.add_incoming(next_sums[r, v], loop)
            initial[r, v] = total
        for r, v in places:
            code.store(initial[r, v], code.at(c_rows[r], 4 * LANES * v))
        return context.get_dummy_value()

    return types.void(rows, vectors, *[types.int64] * 7), codegen


@intrinsic(prefer_literal=True)
def load_transposed(typing, kind, rows, column, target, stride):
    """Transpose ``LANES`` columns of the ``LANES`` cache rows listed at ``rows``; ``column`` is in bytes."""
    row_kind = kind.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        _, rows, column, target, stride = args
        found = []
        for i in range(LANES):
            address = builder.add(code.load(code.at(rows, 8 * i), _I64), column)
            found.append(code.widened(address, row_kind))
        step = 1
        while step < LANES:  # exchange the off-diagonal quarters of ever larger squares
            for i in (i for i in range(LANES) if not i & step):
                upper, lower = found[i], found[i + step]
                left = [lane + LANES - step if lane & step else lane for lane in range(LANES)]
                right = [lane + LANES if lane & step else lane + step for lane in range(LANES)]
                found[i], found[i + step] = code.pick(upper, lower, left), code.pick(upper, lower, right)
            step *= 2
        row_step = builder.mul(stride, ir.Constant(_I64, 4))
        for i, value in enumerate(found):
            code.store(value, builder.add(target, builder.mul(row_step, ir.Constant(_I64, i))))
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def load_units_transposed(typing, rows, group, target, stride):
    """Transpose one group of ``LANES`` rows of codes, as :func:`load_transposed`: two columns from each byte.

    They are written less the code of the number 0; those of the lower halves of bytes before those of the upper ones.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        rows, group, target, stride = args
        first = builder.mul(group, ir.Constant(_I64, CODE_BYTES))
        addresses = [code.load(code.at(rows, 8 * i), _I64) for i in range(LANES)]
        found = code.columns([code.load(builder.add(address, first), _CODES) for address in addresses])
        row_step = builder.mul(stride, ir.Constant(_I64, 4))
        for i, codes in enumerate(found):
            for column, units in zip((i, i + CODE_BYTES), code.units(codes), strict=True):
                code.store(units, builder.add(target, builder.mul(row_step, ir.Constant(_I64, column))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def load_units(typing, source, target):
    """Write a group of codes in the order of :func:`load_units_transposed`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        source, target = args
        for first in range(0, CODE_BYTES, LANES):
            halves = code.units(code.load(code.at(source, first), _BYTES))
            for column, units in zip((first, first + CODE_BYTES), halves, strict=True):
                code.store(units, code.at(target, 4 * column))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def part_group(typing, row):
    """Order the numbers of a group as :func:`load_units_transposed` orders codes: even places, then odd ones."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        found = [code.load(code.at(args[0], 4 * i)) for i in range(0, GROUP, LANES)]
        for odd in (0, 1):
            lanes = [2 * i + odd for i in range(LANES)]
            for i, (left, right) in enumerate(zip(found[::2], found[1::2], strict=True)):
                code.store(code.pick(left, right, lanes), code.at(args[0], 4 * (odd * CODE_BYTES + i * LANES)))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic(prefer_literal=True)
def turn_across(typing, left, right):
    """``left, right = left + right, left - right``, ``LANES`` float32 numbers each."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        left, right = (code.load(address) for address in args)
        code.store(builder.fadd(left, right), args[0])
        code.store(builder.fsub(left, right), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def turn_within(typing, row, factor):
    """Multiply ``LANES`` float32 numbers by Hadamard's matrix of this size, and by a factor."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        found, step = code.load(args[0]), 1
        while step < LANES:
            signs = ir.Constant(_FLOATS, [ir.Constant(_F32, -1.0 if lane & step else 1.0) for lane in range(LANES)])
            exchanged = code.pick(found, found, [lane ^ step for lane in range(LANES)])
            found = code.multiply_add(found, signs, exchanged)
            step *= 2
        code.store(builder.fmul(found, code.splat(args[1])), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic(prefer_literal=True)
def normalise_numbers(typing, row, means, scales):
    """``(number - mean) / scale`` of ``LANES`` float32 numbers, within limits; 0 for NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        found, means, scales = (code.load(address) for address in args)
        found = builder.fdiv(builder.fsub(found, means), scales)
        found = builder.select(builder.fcmp_unordered("uno", found, found), _floats(0.0), found)
        found = code.maximum(code.minimum(found, _floats(MAX_NUMBER)), _floats(-MAX_NUMBER))
        code.store(found, args[0])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic(prefer_literal=True)
def keep_largest(typing, source, target):
    """``target = max(target, |source|)``, ``LANES`` float32 numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        code.store(code.maximum(code.size(code.load(args[0])), code.load(args[1])), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def encode_numbers(typing, source, step, target, sums):
    """Write the codes of ``2 * LANES`` float32 numbers to as many halves of bytes.

    To ``sums`` ([2 * LANES]) are added the products of numbers and codes (less that of 0), and the codes' squares.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        source, step, target, sums = args
        step, found = code.splat(step), []
        products, squares = code.load(sums), code.load(code.at(sums, 4 * LANES))
        for i in range(2):
            number = code.load(code.at(source, 4 * LANES * i))
            place = code.floor(builder.fadd(builder.fdiv(number, step), _floats(MIDDLE + 0.5)))
            place = code.maximum(code.minimum(place, _floats(MAX_CODE)), _floats(0.0))
            unit = builder.fsub(place, _floats(MIDDLE))
            products, squares = code.multiply_add(number, unit, products), code.multiply_add(unit, unit, squares)
            found.append(builder.fptosi(place, _INTS))
        code.store(products, sums)
        code.store(squares, code.at(sums, 4 * LANES))
        even, odd = (code.pick(found[0], found[1], [2 * i + first for i in range(LANES)]) for first in (0, 1))
        code.store(builder.trunc(builder.or_(even, builder.shl(odd, _ints(4))), _BYTES), target)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def load_numbers(typing, kind, source, target, factor):
    """Write ``LANES`` numbers as float32, times a factor."""
    row_kind = kind.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        code.store(builder.fmul(code.widened(args[1], row_kind), code.splat(args[3])), args[2])
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.float32), codegen


@intrinsic(prefer_literal=True)
def store_numbers(typing, kind, source, target, factor):
    """Round ``LANES`` float32 numbers, times a factor, to a kind."""
    row_kind = kind.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        value = builder.fmul(code.load(args[1]), code.splat(args[3]))
        code.store(code.narrowed(value, row_kind), args[2])
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.float32), codegen


@intrinsic(prefer_literal=True)
def add_numbers(typing, source, target, factor, keep):
    """``target = keep * target + factor * source``, ``LANES`` float32 numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        source, target, factor, keep = args
        kept = builder.fmul(code.load(target), code.splat(keep))
        code.store(code.multiply_add(code.load(source), code.splat(factor), kept), target)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.float32), codegen


@intrinsic(prefer_literal=True)
def scale_numbers(typing, target, factors, terms, weight):
    """``target = target * factors + terms * weight``, ``LANES`` float32 numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        target, factors, terms, weight = args
        added = builder.fmul(code.load(terms), code.splat(weight))
        code.store(code.multiply_add(code.load(target), code.load(factors), added), target)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.float32), codegen


@intrinsic(prefer_literal=True)
def sum_of_products(typing, left, right):
    """Sum of the products of ``LANES`` float32 numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        return code.halves(builder.fmul(code.load(args[0]), code.load(args[1])), builder.fadd)

    return types.float32(types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def sum_of_numbers(typing, row):
    """Sum of ``LANES`` float32 numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        return code.halves(code.load(args[0]), builder.fadd)

    return types.float32(types.int64), codegen


@intrinsic(prefer_literal=True)
def row_maximum(typing, count, row):
    """The largest of ``count`` float32 numbers."""
    size = count.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        largest = code.load(args[1])
        for i in range(4 * LANES, 4 * size, 4 * LANES):
            largest = code.maximum(code.load(code.at(args[1], i)), largest)
        return code.halves(largest, code.maximum)

    return types.float32(count, types.int64), codegen


@intrinsic(prefer_literal=True)
def exponentials(typing, count, row, largest):
    """Replace ``count`` float32 numbers by ``exp(number - largest)``; returns their sum."""
    size = count.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        row, largest = args[1], code.splat(args[2])
        total = _floats(0.0)
        for i in range(0, 4 * size, 4 * LANES):
            weight = code.exp(builder.fsub(code.load(code.at(row, i)), largest))
            code.store(weight, code.at(row, i))
            total = builder.fadd(total, weight)
        return code.halves(total, builder.fadd)

    return types.float32(count, types.int64, types.float32), codegen


@intrinsic(prefer_literal=True)
def numbers_at(typing, address, dtype):
    """The pointer to numbers at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(types.int64, dtype), codegen


@intrinsic(prefer_literal=True)
def prefetch(typing, address):
    """Prefetch a cache line."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        to_read, keep_near, data = (ir.Constant(_I32, x) for x in (0, 3, 1))
        builder.call(function, [pointer, to_read, keep_near, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
