"""Vector operations that numba's own loops do not compile to, as LLVM instructions.

Addresses and strides are integers; strides count float32 elements. A KV cache row has one of three kinds, given as a
literal: bfloat16 (numba has no such type), float16, float32. LLVM splits vectors that are too wide for the machine.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from llvmlite import binding, ir
from numba.core import types
from numba.extending import intrinsic

from kvevict_kernels.row_codec import MAX_CODE, MAX_NUMBER, MIDDLE
from kvevict_kernels.row_sizes import GROUP

BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2

_HAS_AVX512 = bool(binding.get_host_cpu_features().get("avx512f", False))
LANES = 16 if _HAS_AVX512 else 8
"""Floats per vector."""
TILE_VECTORS = 4 if _HAS_AVX512 else 2
"""Vectors per row of a tile: with ``TILE_ROWS`` rows, sums and operands fit the machine's registers."""
TILE_ROWS = 4

_INT, _FLOAT = types.int64, types.float32
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
    """A thin layer over llvmlite's builder, whose other methods it has, too."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builder, name)

    def at(self, address: Any, offset: int = 0) -> Any:
        return self.builder.add(address, ir.Constant(_I64, offset)) if offset else address

    def load(self, address: Any, kind: Any = _FLOATS) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=_align(kind))

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=_align(value.type))

    def store_rows(self, values: list[Any], target: Any, stride: Any) -> None:
        """Store vectors ``stride`` numbers apart."""
        row_step = self.mul(stride, ir.Constant(_I64, 4))
        for i, value in enumerate(values):
            self.store(value, self.add(target, self.mul(row_step, ir.Constant(_I64, i))))

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
        return self.each("fmuladd", a, b, c)

    def maximum(self, a: Any, b: Any) -> Any:
        """Element-wise maximum; ``b`` where ``a`` is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def clamped(self, a: Any, low: float, high: float) -> Any:
        """Numbers, none of them NaN, within limits."""
        a = self.select(self.fcmp_ordered("<", a, _floats(high)), a, _floats(high))
        return self.maximum(a, _floats(low))

    def each(self, name: str, *args: Any) -> Any:
        """A function of LLVM, element by element."""
        return self.call_named(f"llvm.{name}.v{LANES}f32", _FLOATS, *args)

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
        n = self.each("rint", builder.fmul(x, _floats(_LOG2_E)))
        r = self.multiply_add(n, _floats(-_LN2_HIGH), x)
        r = self.multiply_add(n, _floats(-_LN2_LOW), r)
        series = _floats(_EXP_TERMS[0])
        for term in _EXP_TERMS[1:]:
            series = self.multiply_add(series, r, _floats(term))
        series = builder.fadd(self.multiply_add(builder.fmul(r, r), series, r), _floats(1.0))
        power = builder.shl(builder.add(builder.fptosi(n, _INTS), _ints(127)), _ints(23))
        return builder.select(is_zero, _floats(0.0), builder.fmul(series, builder.bitcast(power, _FLOATS)))

    def call_named(self, name: str, result: Any, *args: Any) -> Any:
        """Call a function of LLVM."""
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


def _instructions(*kinds: Any, result: Any = types.void) -> Any:
    """Make of a function that emits instructions one that compiled code calls, with arguments of these types.

    None as a type: a literal, which the function gets as a number.
    """

    def wrap(emit: Any) -> Any:
        @intrinsic(prefer_literal=True)
        @wraps(emit)
        def typed(_typing, *given):
            def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                known = (
                    of.literal_value if kind is None else arg for of, kind, arg in zip(given, kinds, args, strict=True)
                )
                found = emit(_Code(builder), *known)
                return context.get_dummy_value() if found is None else found

            return result(*(of if kind is None else kind for of, kind in zip(given, kinds, strict=True))), codegen

        return typed

    return wrap


@_instructions(None, None, *[_INT] * 7)
def multiply_tile(code, rows, vectors, c, c_stride, a, a_stride, b, b_stride, depth):
    """``c[rows, vectors * LANES] += a[rows, depth] @ b[depth, vectors * LANES]``; sums stay in registers."""
    four = ir.Constant(_I64, 4)
    a_step, b_step, c_step = (code.mul(stride, four) for stride in (a_stride, b_stride, c_stride))
    c_rows = [code.add(c, code.mul(c_step, ir.Constant(_I64, r))) for r in range(rows)]
    a_rows = [code.add(a, code.mul(a_step, ir.Constant(_I64, r))) for r in range(rows)]
    places = [(r, v) for r in range(rows) for v in range(vectors)]
    initial = {(r, v): code.load(code.at(c_rows[r], 4 * LANES * v)) for r, v in places}
    before = code.block
    loop, after = code.append_basic_block("depth"), code.append_basic_block("done")
    code.cbranch(code.icmp_signed(">", depth, ir.Constant(_I64, 0)), loop, after)

    code.position_at_end(loop)
    i = code.phi(_I64)
    sums = {place: code.phi(_FLOATS) for place in places}
    b_row = code.add(b, code.mul(i, b_step))
    columns = [code.load(code.at(b_row, 4 * LANES * v)) for v in range(vectors)]
    shift = code.mul(i, four)
    next_sums = {}
    for r in range(rows):
        factor = code.splat(code.load(code.add(a_rows[r], shift), _F32))
        for v in range(vectors):
            next_sums[r, v] = code.multiply_add(factor, columns[v], sums[r, v])
    following = code.add(i, ir.Constant(_I64, 1))
    i.add_incoming(ir.Constant(_I64, 0), before)
    i.add_incoming(following, loop)
    for place in places:
        sums[place].add_incoming(initial[place], before)
        sums[place].add_incoming(next_sums[place], loop)
    code.cbranch(code.icmp_signed("<", following, depth), loop, after)

    code.position_at_end(after)
    for r, v in places:
        total = code.phi(_FLOATS)
        total.add_incoming(initial[r, v], before)
        total.add_incoming(next_sums[r, v], loop)
        initial[r, v] = total
    for r, v in places:
        code.store(initial[r, v], code.at(c_rows[r], 4 * LANES * v))


@_instructions(None, *[_INT] * 4)
def load_transposed(code, kind, rows, column, target, stride):
    """Transpose ``LANES`` columns of the ``LANES`` cache rows listed at ``rows``; ``column`` is in bytes."""
    addresses = [code.load(code.at(rows, 8 * i), _I64) for i in range(LANES)]
    found = [code.widened(code.add(address, column), kind) for address in addresses]
    step = 1
    while step < LANES:  # exchange the off-diagonal quarters of ever larger squares
        for i in (i for i in range(LANES) if not i & step):
            upper, lower = found[i], found[i + step]
            left = [lane + LANES - step if lane & step else lane for lane in range(LANES)]
            right = [lane + LANES if lane & step else lane + step for lane in range(LANES)]
            found[i], found[i + step] = code.pick(upper, lower, left), code.pick(upper, lower, right)
        step *= 2
    code.store_rows(found, target, stride)


@_instructions(*[_INT] * 4)
def load_units_transposed(code, rows, group, target, stride):
    """Transpose one group of ``LANES`` rows of codes, as :func:`load_transposed`: two columns from each byte.

    They are written less the code of the number 0; those of the lower halves of bytes before those of the upper ones.
    """
    first = code.mul(group, ir.Constant(_I64, CODE_BYTES))
    addresses = [code.load(code.at(rows, 8 * i), _I64) for i in range(LANES)]
    columns = code.columns([code.load(code.add(address, first), _CODES) for address in addresses])
    low, high = zip(*map(code.units, columns), strict=True)
    code.store_rows([*low, *high], target, stride)


@_instructions(_INT, _INT)
def load_units(code, source, target):
    """Write a group of codes in the order of :func:`load_units_transposed`."""
    for first in range(0, CODE_BYTES, LANES):
        halves = code.units(code.load(code.at(source, first), _BYTES))
        for column, units in zip((first, first + CODE_BYTES), halves, strict=True):
            code.store(units, code.at(target, 4 * column))


@_instructions(_INT)
def part_group(code, row):
    """Order the numbers of a group as :func:`load_units_transposed` orders codes: even places, then odd ones."""
    found = [code.load(code.at(row, 4 * i)) for i in range(0, GROUP, LANES)]
    for odd in (0, 1):
        lanes = [2 * i + odd for i in range(LANES)]
        for i, (left, right) in enumerate(zip(found[::2], found[1::2], strict=True)):
            code.store(code.pick(left, right, lanes), code.at(row, 4 * (odd * CODE_BYTES + i * LANES)))


@_instructions(_INT, _INT)
def turn_across(code, left, right):
    """``left, right = left + right, left - right``, ``LANES`` float32 numbers each."""
    one, other = code.load(left), code.load(right)
    code.store(code.fadd(one, other), left)
    code.store(code.fsub(one, other), right)


@_instructions(_INT, _FLOAT)
def turn_within(code, row, factor):
    """Multiply ``LANES`` float32 numbers by Hadamard's matrix of this size, and by a factor."""
    found, step = code.load(row), 1
    while step < LANES:
        signs = ir.Constant(_FLOATS, [ir.Constant(_F32, -1.0 if lane & step else 1.0) for lane in range(LANES)])
        exchanged = code.pick(found, found, [lane ^ step for lane in range(LANES)])
        found = code.multiply_add(found, signs, exchanged)
        step *= 2
    code.store(code.fmul(found, code.splat(factor)), row)


@_instructions(_INT, _INT, _INT)
def normalise_numbers(code, row, means, scales):
    """``(number - mean) / scale`` of ``LANES`` float32 numbers, within limits; 0 for NaN."""
    found = code.fdiv(code.fsub(code.load(row), code.load(means)), code.load(scales))
    found = code.select(code.fcmp_unordered("uno", found, found), _floats(0.0), found)
    code.store(code.clamped(found, -MAX_NUMBER, MAX_NUMBER), row)


@_instructions(_INT, _INT)
def keep_largest(code, source, target):
    """``target = max(target, |source|)``, ``LANES`` float32 numbers."""
    code.store(code.maximum(code.each("fabs", code.load(source)), code.load(target)), target)


@_instructions(_INT, _FLOAT, _INT, _INT)
def encode_numbers(code, source, step, target, sums):
    """Write the codes of ``2 * LANES`` float32 numbers to as many halves of bytes.

    To ``sums`` ([2 * LANES]) are added the products of numbers and codes (less that of 0), and the codes' squares.
    """
    step, found = code.splat(step), []
    products, squares = code.load(sums), code.load(code.at(sums, 4 * LANES))
    for i in range(2):
        number = code.load(code.at(source, 4 * LANES * i))
        place = code.each("floor", code.fadd(code.fdiv(number, step), _floats(MIDDLE + 0.5)))
        place = code.clamped(place, 0.0, MAX_CODE)
        unit = code.fsub(place, _floats(MIDDLE))
        products, squares = code.multiply_add(number, unit, products), code.multiply_add(unit, unit, squares)
        found.append(code.fptosi(place, _INTS))
    code.store(products, sums)
    code.store(squares, code.at(sums, 4 * LANES))
    even, odd = (code.pick(*found, [2 * i + first for i in range(LANES)]) for first in (0, 1))
    code.store(code.trunc(code.or_(even, code.shl(odd, _ints(4))), _BYTES), target)


@_instructions(None, _INT, _INT, _FLOAT)
def load_numbers(code, kind, source, target, factor):
    """Write ``LANES`` numbers as float32, times a factor."""
    code.store(code.fmul(code.widened(source, kind), code.splat(factor)), target)


@_instructions(None, _INT, _INT, _FLOAT)
def store_numbers(code, kind, source, target, factor):
    """Round ``LANES`` float32 numbers, times a factor, to a kind."""
    code.store(code.narrowed(code.fmul(code.load(source), code.splat(factor)), kind), target)


@_instructions(_INT, _INT, _FLOAT, _FLOAT)
def add_numbers(code, source, target, factor, keep):
    """``target = keep * target + factor * source``, ``LANES`` float32 numbers."""
    kept = code.fmul(code.load(target), code.splat(keep))
    code.store(code.multiply_add(code.load(source), code.splat(factor), kept), target)


@_instructions(_INT, _INT, _INT, _FLOAT)
def scale_numbers(code, target, factors, terms, weight):
    """``target = target * factors + terms * weight``, ``LANES`` float32 numbers."""
    added = code.fmul(code.load(terms), code.splat(weight))
    code.store(code.multiply_add(code.load(target), code.load(factors), added), target)


@_instructions(_INT, _INT, result=_FLOAT)
def sum_of_products(code, left, right):
    """Sum of the products of ``LANES`` float32 numbers."""
    return code.halves(code.fmul(code.load(left), code.load(right)), code.fadd)


@_instructions(_INT, result=_FLOAT)
def sum_of_numbers(code, row):
    """Sum of ``LANES`` float32 numbers."""
    return code.halves(code.load(row), code.fadd)


@_instructions(None, _INT, result=_FLOAT)
def row_maximum(code, count, row):
    """The largest of ``count`` float32 numbers."""
    largest = code.load(row)
    for i in range(4 * LANES, 4 * count, 4 * LANES):
        largest = code.maximum(code.load(code.at(row, i)), largest)
    return code.halves(largest, code.maximum)


@_instructions(None, _INT, _FLOAT, result=_FLOAT)
def exponentials(code, count, row, largest):
    """Replace ``count`` float32 numbers by ``exp(number - largest)``; returns their sum."""
    largest, total = code.splat(largest), _floats(0.0)
    for i in range(0, 4 * count, 4 * LANES):
        weight = code.exp(code.fsub(code.load(code.at(row, i)), largest))
        code.store(weight, code.at(row, i))
        total = code.fadd(total, weight)
    return code.halves(total, code.fadd)


@_instructions(_INT)
def prefetch(code, address):
    """Prefetch a cache line."""
    pointer = code.inttoptr(address, _I8.as_pointer())
    to_read, keep_near, data = (ir.Constant(_I32, x) for x in (0, 3, 1))
    code.call_named("llvm.prefetch.p0", ir.VoidType(), pointer, to_read, keep_near, data)


@intrinsic(prefer_literal=True)
def numbers_at(typing, address, dtype):
    """The pointer to numbers at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(types.int64, dtype), codegen
