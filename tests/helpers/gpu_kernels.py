"""Every kernel with the arguments and constants that a server of a llama-8B or a like model launches it with.

H = 8 KV heads of 4 q heads each, bfloat16. Imports nothing that needs triton: the specs travel to other environments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvevict_kernels.device_limits import DEPENDENT_ARCH, DeviceLimits
from kvevict_kernels.key_scores import largest_kernel_size
from kvevict_kernels.ragged_decode.chunks import CHUNK_STEP, ITEMS_PER_SM, MIN_CHUNKS
from kvevict_kernels.ragged_decode.tile_table import EXTEND, LATENT_DIM, block_widths, narrow_keys, tiles_for

Spec = dict[str, Any]
DEVICES = {
    80: DeviceLimits(80, num_sms=108, shared_per_sm=167936),
    89: DeviceLimits(89, num_sms=142, shared_per_sm=102400, threads_per_sm=1536),
    90: DeviceLimits(90, num_sms=132, shared_per_sm=233472),
    100: DeviceLimits(100, num_sms=148, shared_per_sm=233472),
}
"""A100, L40S, H100 and H200, B200: limits from NVIDIA's CUDA programming guide, table of compute capabilities."""
HEAD_DIMS = (64, 128, 256)
FP8 = "fp8e4nv"
"""Triton's name of float8_e4m3fn."""
FP8_ARCH = 89
"""Oldest architecture that converts it."""
HEADS: dict[str, Any] = {"H": 8, "G": 4}
LATENT_HEADS: dict[str, Any] = {"H": 1, "G": 128}
"""Of DeepSeek V2 and V3."""
LATENT_VALUE_DIM = 512

BFLOAT16 = ("q_ptr", "k_ptr", "v_ptr", "k_steps_ptr", "v_steps_ptr", "steps_ptr", "out_ptr", "rows_ptr", "staging_ptr")
FLOAT32 = ("lse_ptr", "weights_ptr", "pooled_ptr", "scores_ptr", "statistics_ptr")
INT64 = (
    *("addresses_ptr", "items_ptr", "suffix_items_ptr", "span_address_ptr", "span_starts_ptr", "span_lens_ptr"),
    *("pool_rows_ptr", "token_slots_ptr", "run_address_ptr", "partial_start_ptr", "remaining_ptr"),
)
INT8 = ("kind_ptr", "occupied_ptr", "source_bits_ptr")
NUMBERS = {"req_to_token": "i64"} | dict.fromkeys(("scale_log2", "v_scale", "sm_scale", "norm"), "fp32")
"""Those that are no int32."""


def type_of(name: str) -> str:
    """Type of an argument, which the same name always has."""
    if name in NUMBERS:
        return NUMBERS[name]
    if not name.endswith("_ptr"):
        return "i32"
    for types, kind in ((BFLOAT16, "*bf16"), (FLOAT32, "*fp32"), (INT64, "*i64"), (INT8, "*i8")):
        if name in types:
            return kind
    return "*i32"


def spec(kernel: str, arch: int, constants: dict[str, Any], **more: Any) -> Spec:
    """One compilation; ``constants`` may name more than the kernel takes."""
    return {
        "kernel": f"kvevict_kernels.{kernel}",
        "arch": arch,
        "args": constants,
        "divisible": ["q_stride", "first_column", "width"],
        **more,
    }


def attention_kernels(arch: int, head_dim: int, stored: str = "bf16") -> Iterator[Spec]:
    """The kernels with a loop of products, then their merges; ``stored``: what the arena holds.

    Latents have neither windows nor trees.
    """
    if head_dim == LATENT_DIM:
        yield from _attention_kernels(arch, head_dim, stored)
        return
    kinds: tuple[dict[str, bool], ...] = ({}, {"has_window": True}, {"has_trees": True})
    of_kinds = (_attention_kernels(arch, head_dim, stored, **kind) for kind in kinds)
    for plain, windowed, tree in zip(*of_kinds, strict=True):
        yield plain
        if windowed != plain:
            yield windowed
        if tree != plain:
            yield tree


def few_bits_kernels(arch: int, head_dim: int) -> Iterator[Spec]:
    """The kernels with a loop of products that also read rows of 4 bits, and those that write such rows."""
    for one in _attention_kernels(arch, head_dim, "bf16", has_few_bits=True):
        if label(one).startswith(("split", "extend")):
            yield one
    sizes = {"D": head_dim, "BLOCK_D": head_dim, "BLOCK_W": head_dim // 4, "BLOCK": 16, "staging_ptr": "*u8"}
    yield spec("recode_rows.triton_impl:_encode_kernel", arch, sizes)
    for reads in (True, False):
        yield spec("recode_rows.triton_impl:_move_kernel", arch, sizes | {"READS": reads})


def _attention_kernels(
    arch: int,
    head_dim: int,
    stored: str,
    *,
    has_window: bool = False,
    has_trees: bool = False,
    has_few_bits: bool = False,
) -> Iterator[Spec]:
    """With a window, whatever takes sink logits has some."""
    limits = DEVICES[arch]
    kinds = {"has_window": has_window, "has_few_bits": has_few_bits, "is_fp8": stored == FP8}
    tiles = tiles_for(limits, head_dim, **kinds)
    visible = "*i64" if has_trees else None
    coding: Spec = {} if has_few_bits else dict.fromkeys(("statistics_ptr", "k_steps_ptr", "v_steps_ptr"))
    extras = {"sink_logits_ptr": "*bf16" if has_window else None}
    sizes = {**_sizes(head_dim), "UPCAST": False, "PDL": limits.arch >= DEPENDENT_ARCH}
    sizes |= {"k_ptr": f"*{stored}", "v_ptr": f"*{stored}"}
    sizes |= {"NUM_ITEMS": ITEMS_PER_SM * limits.num_sms, "STEP": CHUNK_STEP}
    for which, tile in enumerate(tiles):
        block: dict[str, Any] = {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "NARROW_N": narrow_keys(tile)}
        options = {"num_stages": tile.stages, "num_warps": tile.warps}
        if which == EXTEND:
            block |= {"visible_ptr": visible, "WINDOWED": has_window} | extras
            widths = {4: narrow_keys(tile), 16: tile.keys} if has_few_bits else {16: tile.keys}
            for bits, keys in widths.items():
                block |= coding | {"BITS": bits, "BLOCK_N": keys}
                yield spec("ragged_extend.triton_impl:_extend_kernel", arch, sizes | block, options=options)
            rows = {"BLOCK_M": tile.rows, "ROWS": 16}
            if stored == "bf16":  # merges do not look at the arena
                yield spec("ragged_extend.triton_impl:_combine_kernel", arch, sizes | rows)
        else:
            block |= {"CLASS": which, "visible_ptr": visible, "WINDOWED": has_window, **coding}
            yield spec("ragged_decode.triton_impl:_split_kernel", arch, sizes | block, options=options)
    if stored == "bf16":
        yield spec(
            "ragged_decode.triton_merge:_merge_kernel",
            arch,
            sizes | {"BLOCK": min(32, 4096 // sizes["BLOCK_D"]), "RUNS": 16} | extras,
        )


def head_dim_kernels(arch: int, head_dim: int, stored: str = "bf16") -> Iterator[Spec]:
    """Kernels of a compression that touch rows of K and V; ``stored``: what the arena holds."""
    is_latent = head_dim == LATENT_DIM
    sizes = {**_sizes(head_dim), "UPCAST": False, "LOG2_E": 1.4426950408889634, "k_ptr": f"*{stored}"}
    for kernel_size in (1, 7, largest_kernel_size(head_dim, DEVICES[arch])):
        block = {1: 64, 7: 128}.get(kernel_size, 128 if kernel_size < 96 else 256)
        block = (32 if kernel_size == 1 else 64) if is_latent else block
        pooling = {"KERNEL": kernel_size, "NUM_DOUBLINGS": (kernel_size - 1).bit_length(), "BLOCK_N": block, "POWER": 1}
        rows = {"BLOCK_R": 16 if is_latent else {64: 64, 128: 32, 256: 16}[block]}
        options = {"num_warps": 8 if block == 256 else 4, "num_stages": 2 if kernel_size > 1 and head_dim > 128 else 3}
        if is_latent and kernel_size > 1:
            options["num_stages"] = 1
        yield spec("key_scores.triton_impl:_key_scores_kernel", arch, sizes | pooling | rows, options=options)
    for name in ("_gather_kernel", "_gather_sum_kernel", "_write_kernel"):
        move: dict[str, Any] = {"HEAD_DIM": head_dim, "BLOCK_D": min(head_dim, 256), "BLOCK": 64}
        kind = "*u8" if stored == FP8 and name == "_gather_kernel" else f"*{stored}"  # plain moves copy bytes
        move |= {"rows_ptr": kind, "staging_ptr": kind}
        yield spec(f"compact_kv.triton_impl:{name}", arch, move, options={"num_warps": 4 if head_dim <= 128 else 8})


def _sizes(head_dim: int) -> dict[str, Any]:
    """Heads of a model, and the blocks of its keys and values."""
    if head_dim == LATENT_DIM:
        return LATENT_HEADS | block_widths(head_dim, LATENT_VALUE_DIM)
    return HEADS | block_widths(head_dim, head_dim)


def small_kernels(arch: int) -> Iterator[Spec]:
    """Kernels that touch no rows."""
    limits = DEVICES[arch]
    rows = {f"ROWS_{which}": tile.rows for which, tile in enumerate(tiles_for(limits, 128)[:EXTEND])}
    yield spec("ragged_decode.triton_layout:_runs_kernel", arch, HEADS | rows | {"BLOCK": 256})
    yield spec("ragged_decode.triton_layout:_work_kernel", arch, HEADS | {"FILL": 128})
    counting = {"CLASS": 0, "LEAST": MIN_CHUNKS[0], "ROW_TILE": 16, "BLOCK": 128, "FILL": 128, "STEP": CHUNK_STEP}
    counting |= {"NUM_ITEMS": ITEMS_PER_SM * limits.num_sms}
    yield spec("ragged_decode.triton_items:suffix_work_kernel", arch, HEADS | counting)
    yield spec("cut_runs.triton_impl:_cut_runs_kernel", arch, {"BLOCK": 32}, options={"num_warps": 1})
    for name in ("_mark_kernel", "_kind_kernel"):
        yield spec(f"compact_kv.triton_impl:{name}", arch, {"BLOCK": 1024})
    yield spec("alloc_head_slots.triton_impl:_indptr_kernel", arch, {"BLOCK": 1024})
    yield spec("alloc_head_slots.triton_impl:_head_slots_kernel", arch, {"BLOCK": 1024, "PER_SLOT": 3})
    for key_bits in (32, 64):
        keys = dict.fromkeys(("keys_ptr", "prefix_ptr", "threshold_ptr"), f"*u{key_bits}")
        tiles = {**keys, "BINS": 256, "SIGN": 1 << (key_bits - 1), "BLOCK": 2048, "MAX_TILES": 256, "mask_ptr": "*i1"}
        options = {"num_warps": 8}
        yield spec("radix_select.triton_impl:_histogram_kernel", arch, tiles, options=options)
        yield spec("radix_select.triton_impl:_pick_kernel", arch, {**keys, "BINS": 256, "BLOCK": 32}, options=options)
        yield spec("radix_select.triton_impl:_mask_kernel", arch, tiles, options=options)


def label(one: Spec) -> str:
    """Name of a compilation beside others of the same kernel; architecture and head_dim apart."""
    args = one["args"]
    name = one["kernel"].rpartition(":")[2].strip("_").removesuffix("_kernel")
    if FP8 in args.get("k_ptr", "") + args.get("rows_ptr", "") or args.get("rows_ptr") == "*u8":
        bf16 = dict.fromkeys(("k_ptr", "v_ptr", "rows_ptr"), "*bf16")
        return f"{label({**one, 'args': args | bf16})}, fp8 rows"
    if "keys_ptr" in args:
        return f"{name}, {args['keys_ptr'].removeprefix('*u')}-bit keys"
    if "recode_rows" in one["kernel"]:
        return "encode, 4 bits" if name == "encode" else f"{'read' if args['READS'] else 'write'}, 4 bits"
    if name in ("split", "extend"):
        more = ", window" if args["WINDOWED"] else ""
        if "statistics_ptr" not in args:
            more += f", {args['BITS']} bits" if "BITS" in args else ", few bits"
        more += ", trees" if args["visible_ptr"] else ""
        return f"{name}, {args['BLOCK_M']} q rows{more}"
    if args.get("sink_logits_ptr"):
        return f"{name}, sink logits"
    if name == "key_scores":
        return f"{name}, pooling {args['KERNEL']}" if args["KERNEL"] > 1 else f"{name}, sum"
    return str(name)
