"""The compiled call: the code of a thread.

A *unit* is one KV head of a part (``words.py``). Its keys are cut into chunks; each chunk gives one partial softmax for
every q row of the unit. Chunks depend on the unit alone, and partial results are merged in the order of the path: a
request's result depends neither on other requests nor on the number of threads.

Numbers in scratch memory are float32. ``num_rows`` counts q rows; ``row`` is a partial result.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import binding
from numba import carray, cfunc, njit
from numba.core import types

from kvevict_kernels.row_sizes import GROUP, ROWS_IN_PLACE, head_slot_of
from kvevict_kernels.span_attention import words as w
from kvevict_kernels.span_attention.numba_rows import (
    WIDTH,
    add_row,
    fill,
    floats,
    int32s,
    int64s,
    item_bytes,
    load_codes,
    load_row,
    multiply,
    multiply_columns,
    part_row,
    product_of,
    scale_row,
    store_row,
    turn_rows,
    uint16s,
)
from kvevict_kernels.span_attention.numba_vectors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LANES,
    TILE_ROWS,
    exponentials,
    load_transposed,
    load_units_transposed,
    prefetch,
    row_maximum,
)
from kvevict_kernels.span_attention.openmp import Team

_thread_number = types.ExternalFunction("kvevict_omp_thread_number", types.int32())
_thread_count = types.ExternalFunction("kvevict_omp_thread_count", types.int32())
_barrier = types.ExternalFunction("kvevict_omp_barrier", types.void())
_head_slot_of = njit(head_slot_of)

_LOWEST, _ZERO, _ONE, _MINUS_INFINITY = np.float32(-1e30), np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
_BLOCK, _CHUNK, _MAX_CHUNKS, _KEY_COST = w.BLOCK, w.CHUNK, w.MAX_CHUNKS, w.KEY_COST
_LINE = 64
_TIMES_TO_JOIN = 4  # five times part_row change nothing
_K_STEPS_AT = 8 * _BLOCK
_V_STEPS_AT = 12 * _BLOCK
_SCORES_AT = 16 * _BLOCK
_KEYS_AT = _SCORES_AT + 4 * TILE_ROWS * _BLOCK


@njit
def _values_in(scratch, head_dim):
    return scratch + _KEYS_AT + 4 * _BLOCK * head_dim


@njit
def _queries_in(scratch, head_dim):
    return scratch + _KEYS_AT + 8 * _BLOCK * head_dim


@njit
def _first_seen_in(scratch, head_dim, num_rows):
    return scratch + _KEYS_AT + 8 * _BLOCK * head_dim + 4 * head_dim * num_rows


def scratch_bytes(head_dim: int, max_rows: int) -> int:
    """Bytes that a thread needs for units of up to ``max_rows`` q rows; whole cache lines."""
    first_seen = -(-8 * max_rows // _LINE) * _LINE
    return _KEYS_AT + 8 * _BLOCK * head_dim + 4 * head_dim * max_rows + first_seen


@njit
def _num_rows(words, part):
    part_tokens = int64s(words[w.PART_TOKENS])
    return (part_tokens[part + 1] - part_tokens[part]) * words[w.GROUP]


@njit
def _num_keys(words, part, head):
    if part >= words[w.NUM_SPANS]:
        return int64s(words[w.SUFFIX_LENS])[part - words[w.NUM_SPANS]]
    return np.int64(int32s(int64s(words[w.SPAN_LENS])[part])[words[w.LAYER] * words[w.NUM_HEADS] + head])


@njit
def _chunk_len(num_keys):
    return _CHUNK * ((num_keys + _CHUNK * _MAX_CHUNKS - 1) // (_CHUNK * _MAX_CHUNKS))


@njit
def _bits_of(words, part):
    return int64s(words[w.SPAN_BITS])[part] if part < words[w.NUM_SPANS] else 16


@njit
def _statistics_of(words, which, head):
    """Address of a head's means or scales."""
    return words[which] + 4 * (words[w.LAYER] * words[w.NUM_HEADS] + head) * words[w.HEAD_DIM]


@njit
def _load_queries(words, part, head, scratch):
    """Load the q rows of a unit, times the softmax scale: group after group of its tokens.

    Those that read codes are turned already (:func:`_turn_share`).
    """
    part_tokens, tokens = int64s(words[w.PART_TOKENS]), int64s(words[w.TOKENS])
    group, head_dim = words[w.GROUP], words[w.HEAD_DIM]
    target, is_narrow = _queries_in(scratch, head_dim), _bits_of(words, part) != 16
    for place in range(part_tokens[part], part_tokens[part + 1]):
        if is_narrow:
            first = (tokens[place] * words[w.NUM_HEADS] + head) * group
            load_row(FLOAT32, group * head_dim, words[w.TURNED] + 4 * first * head_dim, target, _ONE)
        else:
            _load_group(words, tokens[place], head, target)
        target += 4 * group * head_dim


@njit
def _load_group(words, token, head, target):
    """Load the q rows of a token and KV head, times the softmax scale."""
    kind, count = words[w.Q_KIND], words[w.GROUP] * words[w.HEAD_DIM]
    source = words[w.Q] + (token * words[w.Q_STRIDE] + head * count) * item_bytes(kind)
    load_row(kind, count, source, target, floats(words.ctypes.data + 8 * w.SCALE)[0])


@njit
def _turn_share(words, thread, num_threads, scratch):
    """Turn the queries of every ``num_threads``-th pair of a new token and a KV head, for rows of 4 bits.

    Their keys are read as codes: their scale and the rotation are applied to the queries, and their mean, the same for
    all keys, is an offset of a row's scores.
    """
    part_tokens, tokens, num_spans = int64s(words[w.PART_TOKENS]), int64s(words[w.TOKENS]), words[w.NUM_SPANS]
    group, head_dim, num_heads = words[w.GROUP], words[w.HEAD_DIM], words[w.NUM_HEADS]
    offsets, num_parts = floats(words[w.OFFSETS]), num_spans + words[w.NUM_REQUESTS]
    for pair in range(thread, (part_tokens[num_parts] - part_tokens[num_spans]) * num_heads, num_threads):
        token, head = tokens[part_tokens[num_spans] + pair // num_heads], pair % num_heads
        mean, scales = _statistics_of(words, w.K_MEAN, head), _statistics_of(words, w.K_SCALE, head)
        first = (token * num_heads + head) * group
        rows = words[w.TURNED] + 4 * first * head_dim
        _load_group(words, token, head, rows)
        for g in range(group):
            offsets[first + g] = product_of(head_dim, rows + 4 * g * head_dim, mean)
            scale_row(head_dim, rows + 4 * g * head_dim, scales, mean, _ZERO)
        turn_rows(group, head_dim, rows, words[w.ROTATION], scratch)
        part_row(group * head_dim, rows)


@njit
def _load_keys(words, part, head, first, num_keys, num_next, scratch):
    """Load a block of keys: rows of K transposed, rows of V as they are. Rows of 4 bits: codes, and the rows' steps."""
    num_spans, num_heads, layer = words[w.NUM_SPANS], words[w.NUM_HEADS], words[w.LAYER]
    kind, head_dim, v_head_dim = words[w.KIND], words[w.HEAD_DIM], words[w.V_HEAD_DIM]
    if part < num_spans:
        start = int32s(int64s(words[w.SPAN_STARTS])[part])[layer * num_heads + head]
        numbers = int32s(int64s(words[w.SPAN_ROWS])[part] + 4 * (start + first))
        factor, shift = 1, 0
    else:
        numbers = int32s(int64s(words[w.SUFFIX_SLOTS])[part - num_spans] + 4 * first)
        factor, shift = num_heads, _head_slot_of(layer, 0, head, words[w.NUM_TOKEN_SLOTS], num_heads)
    is_narrow, per_slot, row_bytes = False, 1, head_dim * item_bytes(kind)
    if _bits_of(words, part) != 16:
        is_narrow, per_slot, row_bytes = True, ROWS_IN_PLACE, head_dim // 2
    rows, values, to_values = int64s(scratch), _values_in(scratch, head_dim), words[w.V] - words[w.K]
    k_steps, v_steps = uint16s(words[w.K_STEPS]), uint16s(words[w.V_STEPS])
    k_bits, v_bits = int32s(scratch + _K_STEPS_AT), int32s(scratch + _V_STEPS_AT)  # of float32 numbers
    for i in range(num_keys):
        number = shift + factor * np.int64(numbers[i])
        if number < 0 or number >= words[w.NUM_HEAD_SLOTS] * per_slot:
            # A thread cannot raise: it notes the number, and reads row 0 instead.
            words[w.WRONG_SLOT] = number // per_slot
            number = np.int64(0)
        rows[i] = words[w.K] + number * row_bytes
        if is_narrow:
            k_bits[i], v_bits[i] = np.int32(k_steps[number]) << 16, np.int32(v_steps[number]) << 16
            load_codes(head_dim, rows[i] + to_values, values + 4 * i * head_dim)
        else:
            load_row(kind, v_head_dim, rows[i] + to_values, values + 4 * i * v_head_dim, _ONE)
    # Rows lie anywhere in the arena, which the processor cannot foresee.
    for i in range(num_keys, num_keys + num_next):
        number = shift + factor * np.int64(numbers[i])
        row = words[w.K] + number * row_bytes
        for line in range(row, row + row_bytes, _LINE):
            prefetch(line)
            prefetch(line + to_values)
        if is_narrow:
            prefetch(words[w.K_STEPS] + 2 * number)
            prefetch(words[w.V_STEPS] + 2 * number)
    for i in range(num_keys, _BLOCK):
        # A block is always multiplied whole; what these give is hidden by the mask.
        rows[i] = words[w.ZEROS]
        k_bits[i] = v_bits[i] = 0
    for i in range(0, num_keys, LANES):
        target = scratch + _KEYS_AT + 4 * i
        if is_narrow:
            for group in range(head_dim // GROUP):
                load_units_transposed(scratch + 8 * i, group, target + 4 * group * GROUP * _BLOCK, _BLOCK)
            continue
        for column in range(0, head_dim, LANES):
            if kind == BFLOAT16:
                load_transposed(BFLOAT16, scratch + 8 * i, 2 * column, target + 4 * column * _BLOCK, _BLOCK)
            elif kind == FLOAT16:
                load_transposed(FLOAT16, scratch + 8 * i, 2 * column, target + 4 * column * _BLOCK, _BLOCK)
            else:
                load_transposed(FLOAT32, scratch + 8 * i, 4 * column, target + 4 * column * _BLOCK, _BLOCK)


@njit
def _find_first_seen(words, part, head, unit_len, scratch):
    """Find the first key of the unit that each of its tokens sees in a layer with a window; return the least of them.

    Keys of a unit are in the order of their positions.
    """
    part_tokens, token_positions = int64s(words[w.PART_TOKENS]), int64s(words[w.TOKEN_POSITIONS])
    first_token, num_rows = part_tokens[part], _num_rows(words, part)
    num_tokens = part_tokens[part + 1] - first_token
    target = int64s(_first_seen_in(scratch, words[w.HEAD_DIM], num_rows))
    least = unit_len
    if part >= words[w.NUM_SPANS]:
        for token in range(num_tokens):
            depth = token_positions[first_token + token] - token_positions[first_token]
            target[token] = max(unit_len - num_tokens + depth + 1 - words[w.WINDOW], 0)
            least = min(least, target[token])
        return least
    start = int32s(int64s(words[w.SPAN_STARTS])[part])[words[w.LAYER] * words[w.NUM_HEADS] + head]
    positions = int32s(int64s(words[w.SPAN_POSITIONS])[part] + 4 * start)
    for token in range(num_tokens):
        hidden = token_positions[first_token + token] - words[w.WINDOW]  # last position that it does not see
        low, high = 0, unit_len
        if unit_len > 0 and positions[0] > hidden:
            high = 0
        while low < high:
            middle = (low + high) // 2
            if positions[middle] > hidden:
                high = middle
            else:
                low = middle + 1
        target[token] = low
        least = min(least, low)
    return least


@njit
def _hide_branches(words, part, token, first, num_keys, row):
    """Hide those keys of a block that one new token does not see.

    ``first`` is the place of the block's first key among the new tokens, negative before them.
    """
    scores, place = floats(row), int64s(words[w.PART_TOKENS])[part] + token
    visible = int64s(words[w.VISIBLE])[int64s(words[w.TOKENS])[place]]
    for i in range(max(-first, 0), num_keys):
        if (visible >> (first + i)) & 1 == 0:
            scores[i] = _MINUS_INFINITY


@njit
def _attend_chunk(words, part, head, unit_len, first, last, row_0, scratch):
    """Compute the partial results of a chunk, from ``row_0`` on."""
    head_dim, v_head_dim = words[w.HEAD_DIM], words[w.V_HEAD_DIM]
    group, num_rows = words[w.GROUP], _num_rows(words, part)
    maxima, totals = floats(words[w.MAXIMA] + 4 * row_0), floats(words[w.TOTALS] + 4 * row_0)
    sums, scores = words[w.SUMS] + 4 * row_0 * v_head_dim, scratch + _SCORES_AT
    queries, keys, values = _queries_in(scratch, head_dim), scratch + _KEYS_AT, _values_in(scratch, head_dim)
    is_own, is_narrow = part >= words[w.NUM_SPANS], _bits_of(words, part) != 16
    for r in range(num_rows):
        maxima[r], totals[r] = _LOWEST, _ZERO
    first_seen, least_seen = int64s(_first_seen_in(scratch, head_dim, num_rows)), 0
    if words[w.WINDOW] != 0:
        least_seen = _find_first_seen(words, part, head, unit_len, scratch)
        if last <= least_seen:  # no row sees any of it; the merge skips such a chunk
            return
    fill(sums, num_rows * v_head_dim, _ZERO)
    for start in range(first, last, _BLOCK):
        num_keys = min(_BLOCK, last - start)
        if start + num_keys <= least_seen:
            continue
        num_next = min(_BLOCK, unit_len - start - num_keys)
        _load_keys(words, part, head, start, num_keys, num_next, scratch)
        for tile in range(0, num_rows, TILE_ROWS):
            tile_rows = min(TILE_ROWS, num_rows - tile)
            fill(scores, tile_rows * _BLOCK, _ZERO)
            rows = queries + 4 * tile * head_dim
            for i in range(0, 4 * _BLOCK, 4 * WIDTH):
                multiply(tile_rows, scores + i, _BLOCK, rows, head_dim, keys + i, _BLOCK, head_dim)
            for r in range(tile_rows):
                num_seen = num_keys
                if is_own and words[w.VISIBLE] == 0:  # a new token sees its predecessors and itself
                    num_seen = min(num_keys, unit_len - (num_rows - tile - r - 1) // group - start)
                row = scores + 4 * r * _BLOCK
                if is_narrow:
                    scale_row(_BLOCK, row, scratch + _K_STEPS_AT, scratch + _K_STEPS_AT, _ZERO)
                num_seen = max(num_seen, 0)
                fill(row + 4 * num_seen, _BLOCK - num_seen, _MINUS_INFINITY)
                if is_own and words[w.VISIBLE] != 0:
                    first_new = unit_len - num_rows // group
                    _hide_branches(words, part, (tile + r) // group, start - first_new, num_keys, row)
                if words[w.WINDOW] != 0:
                    fill(row, min(max(first_seen[(tile + r) // group] - start, 0), _BLOCK), _MINUS_INFINITY)
                before = maxima[tile + r]
                largest = max(before, row_maximum(_BLOCK, row))
                total = exponentials(_BLOCK, row, largest)
                if is_narrow:
                    scale_row(_BLOCK, row, scratch + _V_STEPS_AT, scratch + _V_STEPS_AT, _ZERO)
                if largest > before:
                    keep = np.float32(math.exp(before - largest))
                    maxima[tile + r] = largest
                    total += totals[tile + r] * keep
                    target = sums + 4 * (tile + r) * v_head_dim
                    add_row(v_head_dim, target, target, _ZERO, keep)
                else:
                    total += totals[tile + r]
                totals[tile + r] = total
            target = sums + 4 * tile * v_head_dim
            multiply_columns(tile_rows, target, scores, _BLOCK, values, v_head_dim, num_keys)


@njit
def _merge_row(words, request, token, head, g, scratch):
    """Merge one q row of a request's ``token``-th new token: along its path, then its own tokens.

    What is read of codes is added up beside the rest, and turned at the end.
    """
    num_spans, num_heads, group = words[w.NUM_SPANS], words[w.NUM_HEADS], words[w.GROUP]
    v_head_dim = words[w.V_HEAD_DIM]
    paths, path_spans = int64s(words[w.PATHS]), int64s(words[w.PATH_SPANS])
    path_places, unit_rows = int64s(words[w.PATH_PLACES]), int64s(words[w.UNIT_ROWS])
    maxima, totals = floats(words[w.MAXIMA]), floats(words[w.TOTALS])
    place = int64s(words[w.TOKENS])[int64s(words[w.PART_TOKENS])[num_spans + request] + token]
    q_row = (place * num_heads + head) * group + g
    end = paths[request + 1]
    largest, total, code_total, codes = _LOWEST, _ZERO, _ZERO, scratch + 4 * v_head_dim
    fill(scratch, 2 * v_head_dim, _ZERO)
    # In the order of the path, so that a result depends neither on other requests nor on the number of threads.
    for i in range(paths[request], end + 1):
        part, place = num_spans + request, token
        if i < end:
            part, place = path_spans[i], path_places[i] + token
        is_narrow = _bits_of(words, part) != 16
        offset = floats(words[w.OFFSETS])[q_row] if is_narrow else _ZERO
        row = unit_rows[part * num_heads + head] + place * group + g
        unit_len = _num_keys(words, part, head)
        for _ in range(0, unit_len, max(_chunk_len(unit_len), 1)):
            if totals[row] != _ZERO:
                before, maximum = largest, maxima[row] + offset
                largest = max(before, maximum)
                keep, factor = np.float32(math.exp(before - largest)), np.float32(math.exp(maximum - largest))
                total = total * keep + totals[row] * factor
                code_total *= keep
                if is_narrow:
                    code_total += totals[row] * factor
                added = words[w.SUMS] + 4 * row * v_head_dim
                add_row(v_head_dim, added, codes if is_narrow else scratch, factor, keep)
                if keep != _ONE:
                    other = scratch if is_narrow else codes
                    add_row(v_head_dim, other, other, _ZERO, keep)
            row += _num_rows(words, part)
    if code_total != _ZERO:
        mean, scales = _statistics_of(words, w.V_MEAN, head), _statistics_of(words, w.V_SCALE, head)
        for _ in range(_TIMES_TO_JOIN):
            part_row(v_head_dim, codes)
        turn_rows(1, v_head_dim, codes, words[w.ROTATION], codes + 4 * v_head_dim)
        scale_row(v_head_dim, codes, scales, mean, code_total)
        add_row(v_head_dim, codes, scratch, _ONE, _ONE)
    if words[w.SINK_LOGITS] != 0:
        sink = floats(words[w.SINK_LOGITS])[head * group + g]
        before = largest
        largest = max(before, sink)
        keep = np.float32(math.exp(before - largest))
        total = total * keep + np.float32(math.exp(sink - largest))
        add_row(v_head_dim, scratch, scratch, _ZERO, keep)
    floats(words[w.LSE])[q_row] = largest + np.float32(math.log(total))
    kind = words[w.Q_KIND]
    store_row(kind, v_head_dim, scratch, words[w.OUT] + item_bytes(kind) * q_row * v_head_dim, _ONE / total)


@njit
def _attend_share(words, thread, num_threads, scratch):
    """Compute a thread's partial results: the chunks that begin within its share of the total cost."""
    num_parts, num_heads = words[w.NUM_SPANS] + words[w.NUM_REQUESTS], words[w.NUM_HEADS]
    unit_rows = int64s(words[w.UNIT_ROWS])
    all_cost = 0
    for part in range(num_parts):
        for head in range(num_heads):
            all_cost += _num_keys(words, part, head) * (_num_rows(words, part) + _KEY_COST)
    begin, end = all_cost * thread // num_threads, all_cost * (thread + 1) // num_threads
    cost, row = 0, 0
    # Every thread counts all chunks: that takes less time than to hand them out.
    for part in range(num_parts):
        num_rows = _num_rows(words, part)
        for head in range(num_heads):
            unit_len = _num_keys(words, part, head)
            # The others read it behind the barrier.
            if thread == 0:
                unit_rows[part * num_heads + head] = row
            chunk_len = _chunk_len(unit_len)
            has_queries = False
            for first in range(0, unit_len, max(chunk_len, 1)):
                last = min(first + chunk_len, unit_len)
                # A chunk belongs to the thread in whose share it begins: no two threads write the same partial results.
                if begin <= cost < end:
                    if not has_queries:
                        _load_queries(words, part, head, scratch)
                        has_queries = True
                    _attend_chunk(words, part, head, unit_len, first, last, row, scratch)
                cost += (last - first) * (num_rows + _KEY_COST)
                row += num_rows


@njit
def _merge_share(words, thread, num_threads, scratch):
    """Merge every ``num_threads``-th pair of a new token and a KV head."""
    part_tokens, num_spans = int64s(words[w.PART_TOKENS]), words[w.NUM_SPANS]
    pair = 0
    for request in range(words[w.NUM_REQUESTS]):
        for token in range(part_tokens[num_spans + request + 1] - part_tokens[num_spans + request]):
            for head in range(words[w.NUM_HEADS]):
                if pair % num_threads == thread:
                    for g in range(words[w.GROUP]):
                        _merge_row(words, request, token, head, g, scratch)
                pair += 1


def link(team: Team) -> None:
    """Let code that is compiled, or loaded, from now on find the functions of ``team``."""
    binding.add_symbol(_thread_number.symbol, team.thread_number)
    binding.add_symbol(_thread_count.symbol, team.thread_count)
    binding.add_symbol(_barrier.symbol, team.barrier)


@njit
def share_of(count):
    """Number of the calling thread, and begin and end of its share of so many pieces of work."""
    thread, num_threads = np.int64(_thread_number()), np.int64(_thread_count())
    return thread, count * thread // num_threads, count * (thread + 1) // num_threads


def compile_call(stamp: int, is_cached: bool) -> Any:
    """Compile the call, or load it; see :func:`kvevict_kernels.span_attention.openmp.compiled`."""

    @cfunc(types.void(types.CPointer(types.int64)), cache=is_cached)
    def attend(address):
        words = carray(address, w.NUM_WORDS)
        # Never so. The comparison makes the stamp a part of the code, by which numba finds the cached compilation.
        if words[w.STAMP] != stamp:
            return
        thread, num_threads = np.int64(_thread_number()), np.int64(_thread_count())
        scratch = words[w.SCRATCH] + thread * words[w.SCRATCH_STRIDE]
        if words[w.TURNED] != 0:
            _turn_share(words, thread, num_threads, scratch)
            _barrier()
        _attend_share(words, thread, num_threads, scratch)
        _barrier()
        _merge_share(words, thread, num_threads, scratch)

    return attend
