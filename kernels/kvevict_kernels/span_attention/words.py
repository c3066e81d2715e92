"""Indices into the list of 64-bit words that the compiled function gets.

Unless said otherwise a word is the address of an int64 array. A *part* is a span (``0 .. NUM_SPANS``), with the new
tokens of all requests that read it, or a request's suffix (``NUM_SPANS ..``).
"""

from __future__ import annotations

BLOCK = 64
"""Keys transposed and multiplied at once; a multiple of every tile's width."""
CHUNK = 256
"""Keys of one partial softmax, the work of one thread at a time; a multiple of this where more than ``MAX_CHUNKS``
would be needed."""
MAX_CHUNKS = 16
"""Partial results of a q row and one unit, at most."""
KEY_COST = 6
"""Cost of reading a key, in q rows multiplied with it (6 to 21 ns, cached or not, and 3 ns per row)."""
NO_SLOT = 1 << 62
"""Value of ``WRONG_SLOT`` without an error."""

(
    STAMP,  # number: of the compiled code
    LAYER,  # number
    Q,  # address of the queries
    Q_STRIDE,  # number: elements from token to token
    Q_KIND,  # number: kind of q and out
    OUT,  # address [num_tokens, num_qo_heads, v_head_dim]
    LSE,  # address [num_tokens, num_qo_heads], float32
    SCALE,  # softmax scale, float32 in the lower half
    WINDOW,  # number: tokens that a query of the layer sees at most, itself included; 0: all
    SINK_LOGITS,  # address [num_qo_heads], float32: logits that a row's softmax counts once; 0: there are none
    K,  # address of the arena's keys
    V,  # address of the arena's values
    KIND,  # number: kind of the arenas
    K_MEAN,  # address [num_layers, num_kv_heads, head_dim], float32, of the model's keys; 0: no span has 4 bits
    K_SCALE,  # likewise
    V_MEAN,  # likewise, of its values
    V_SCALE,  # likewise
    K_STEPS,  # address [rows of 4 bits], bfloat16: steps of the arena's keys
    V_STEPS,  # likewise, of its values
    ROTATION,  # address [head_dim, head_dim], float32
    TURNED,  # address [num_tokens, num_qo_heads, head_dim], float32: queries for rows of 4 bits; 0: no span has any
    OFFSETS,  # address [num_tokens, num_qo_heads], float32: of their scores
    HEAD_DIM,  # number
    V_HEAD_DIM,  # number, at most HEAD_DIM
    NUM_HEADS,  # number of KV heads
    GROUP,  # number of q heads per KV head
    NUM_TOKEN_SLOTS,  # number per layer
    NUM_HEAD_SLOTS,  # number in the arena
    NUM_SPANS,  # number
    NUM_REQUESTS,  # number
    SPAN_ROWS,  # per span, address of its row numbers, int32
    SPAN_BITS,  # per span, number: bits of its rows
    SPAN_STARTS,  # per span, address of [num_layers, num_kv_heads], int32
    SPAN_LENS,  # per span, address of [num_layers, num_kv_heads], int32
    SPAN_POSITIONS,  # per span, address of the positions of its rows, int32; read by layers with a window
    SUFFIX_SLOTS,  # per request, address of the token slots of its suffix, int32
    SUFFIX_LENS,  # per request, number
    PART_TOKENS,  # per part and one more: where its tokens begin in TOKENS
    TOKENS,  # new tokens that read each part, in order
    TOKEN_POSITIONS,  # with TOKENS: position of each; read by layers with a window
    VISIBLE,  # address [num_tokens], int64: bit j: a token sees its request's j-th new one; 0: it sees those before it
    PATHS,  # per request and one more: where its spans begin in PATH_SPANS
    PATH_SPANS,  # spans of each request, root first
    PATH_PLACES,  # with PATH_SPANS: place of the request's first token among the span's
    UNIT_ROWS,  # per (part, KV head): first partial result; written by the call
    SUMS,  # address [num_partials, v_head_dim], float32: unnormalised outputs
    MAXIMA,  # address [num_partials], float32
    TOTALS,  # address [num_partials], float32
    SCRATCH,  # address of the threads' scratch memory
    SCRATCH_STRIDE,  # bytes per thread
    ZEROS,  # address of a row of zeros
    WRONG_SLOT,  # number: a head slot that is not in the arena, or NO_SLOT; written by the call
    NUM_WORDS,
) = range(53)
