"""``sgl-kvevict size``: how many prefixes of a model fit into a KV pool, at which share of their bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import ByteSize, TypeAdapter, ValidationError

from kvevict_kernels.row_sizes import STEP_BYTES
from sgl_kvevict.cli.model_names import resolve_model, unknown_model
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.geometry import ENTRY_BYTES, INDEX_BYTES, KVGeometry
from sgl_kvevict.long_prompts import LongPrompts
from sgl_kvevict.support import BITS, AfterLoad, reasons

NOT_FOR_PROMPTS = 7
"""Token slots of the pool that SGLang's limit on a prompt's length leaves free."""
KNOWN_HERE = ("latents", "head_dim")
"""Rows of :data:`sgl_kvevict.support.BITS` that follow from the configuration and the sizes of a model."""


@dataclass(frozen=True)
class Fit:
    """Number of prefixes that fit at one share of their bytes.

    Attributes:
        share: of the bytes of the prefix, uncompressed.
        name: what the share is in the configuration, if it is anything there.
        prefix_slots: token slots of one cached prefix.
        kept: share of the entries that is stored.
        entries: how many that are, over all layers and heads, by the bits of their rows.
        beside_bytes: bytes on the device beside the pool, of its entries and of their steps.
        prefixes: number that fit, the last of them as it is during prefill: uncompressed or, if it is longer than the
            pool, uncompressed in its last chunk; 0 if such a prompt is refused.
        host_prefixes: number that fit the host's memory beside these.
        load_bytes: bytes copied when one of them comes back, at most.
        tokens_per_slot: tokens of a prefix divided by its slots.
    """

    share: float
    name: str
    prefix_slots: int
    prefix_bytes: int
    kept: float
    entries: dict[int, int]
    beside_bytes: int
    prefixes: int
    host_prefixes: int
    load_bytes: int
    tokens_per_slot: float


def read_model_sizes(model: str) -> KVGeometry:
    """Read the sizes from a model's configuration; ``model`` is a folder, a hub name or a name here.

    They are those of a pool of one slot. Recurrent layers (``linear_attention``) have no KV, and do not count.
    ConfigError: no such model, or it has no plain attention.
    """
    if reason := unknown_model(model):
        raise ConfigError(reason)
    model = resolve_model(model)
    allowed = "a folder with a config.json, or a hub name that can be reached from here"
    folder = Path(model)
    try:
        file = folder / "config.json" if folder.is_dir() else _downloaded(model)
        values = json.loads(file.read_text(encoding="utf-8"))
        values = values.get("text_config", values)
    except (OSError, ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model: got {model!r} ({reason}); allowed: {allowed}") from error
    missing = [name for name in ("num_hidden_layers", "num_attention_heads", "hidden_size") if name not in values]
    if missing:
        raise ConfigError(f"model: got {model!r}, whose configuration lacks {', '.join(missing)}")
    num_heads = values["num_attention_heads"]
    kinds = values.get("layer_types") or ["full_attention"] * values["num_hidden_layers"]
    dtype = values.get("dtype") or values.get("torch_dtype") or "bfloat16"
    # Without the field every query head has keys of its own.
    num_kv_heads = values.get("num_key_value_heads") or num_heads
    head_dim = values.get("head_dim") or values["hidden_size"] // num_heads
    latent_dim = values.get("kv_lora_rank")
    if latent_dim:
        num_kv_heads, head_dim = 1, latent_dim + values["qk_rope_head_dim"]
    return KVGeometry(
        num_layers=sum(kind != "linear_attention" for kind in kinds),
        num_qo_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_token_slots=1,
        latent_dim=head_dim if latent_dim else 0,
        itemsize=4 if dtype == "float32" else 2,
    )


def _downloaded(hub_name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ConfigError(f"model: got {hub_name!r}, and hub names need the package huggingface_hub") from error
    return Path(hf_hub_download(hub_name, "config.json"))


def parse_bytes(text: str, name: str = "--kv-memory", *, least: int = 1) -> int:
    """Read an amount of memory (``40GB``, ``512MiB``, or bytes); ConfigError, which says ``name``, if it is none."""
    try:
        amount = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        amount = -1
    if amount < least:
        allowed = f"an amount like 40GB, 512MiB or a number of bytes, >= {least}"
        raise ConfigError(f"{name}: got {text!r}; allowed: {allowed}")
    return amount


def with_bits_of(config: KVEvictConfig, sizes: KVGeometry) -> tuple[KVEvictConfig, list[str]]:
    """The configuration with the bits that a server's rows have, and why these are 16, if others were configured.

    A server knows more reasons (:data:`sgl_kvevict.support.BITS`): its log says what it has chosen.
    """
    table = {name: BITS[name] for name in KNOWN_HERE}
    why = [] if config.bits == 16 else reasons(table, cast(AfterLoad, sizes))
    return (config.model_copy(update={"bits": 16}) if why else config), why


def prefix_slots(config: KVEvictConfig, num_tokens: int, share: float | None = None) -> int:
    """Token slots of one cached prefix at a share (None: the budget)."""
    if config.policy == "none" or num_tokens < config.min_prefix_tokens or share == 1:
        return num_tokens
    return config.num_slots(num_tokens, share=share)


def fits(
    config: KVEvictConfig,
    sizes: KVGeometry,
    num_tokens: int,
    pool_slots: int,
    reserved_slots: int = 0,
    host_bytes: int = 0,
) -> list[Fit]:
    """Compute how many prefixes of ``num_tokens`` fit: uncompressed, and at each share to which they shrink.

    ``reserved_slots`` of the pool are left to the questions and answers of running requests; ``host_bytes`` hold what
    the pool drops. ``config.bits`` are those of :func:`with_bits_of`.

    A prompt longer than the pool counts while it is prefilled with what it holds if it shrinks no further than to the
    share (:meth:`LongPrompts.slots_at_peak`).
    """
    shares = tuple(dict.fromkeys((1.0, *config.shares)))
    names = {shares[-1]: "min_budget", config.budget: "budget", 1.0: "uncompressed"}
    available = pool_slots - reserved_slots
    # Chunks as large as the pool: the plan then takes the chunk that it would choose itself.
    plan = LongPrompts.of(config, available, available)
    longest, is_long = longest_prompt(config, available), is_longer_than(available, num_tokens)
    rows = []
    for share in shares:
        slots = prefix_slots(config, num_tokens, share)
        num_entries = num_tokens * sizes.num_runs
        by_head = config.tokens_kept(slots, num_tokens)
        entries = {bits: count * sizes.num_runs for bits, count in by_head.items() if count}
        kept, steps = sum(entries.values()), entries.get(4, 0) * 2 * STEP_BYTES
        load_bytes = slots * sizes.slot_bytes + kept * INDEX_BYTES + steps
        # The last prefix is prefilled beside the others, which are cached by then.
        room = available - (plan.slots_at_peak(num_tokens, share) if is_long and plan is not None else num_tokens)
        rows.append(
            Fit(
                share=share,
                name=names.get(share, ""),
                prefix_slots=slots,
                prefix_bytes=slots * sizes.slot_bytes,
                kept=kept / num_entries,
                entries=entries,
                beside_bytes=0 if share == 1 else kept * ENTRY_BYTES + steps,
                prefixes=room // slots + 1 if room >= 0 and num_tokens <= longest else 0,
                host_prefixes=host_bytes // load_bytes,
                load_bytes=load_bytes,
                tokens_per_slot=num_tokens / slots,
            )
        )
    return rows


def longest_prompt(config: KVEvictConfig, pool_slots: int) -> int:
    """Return the tokens of the longest prompt that a pool serves, whatever ``--chunked-prefill-size`` is."""
    plan = LongPrompts.of(config, pool_slots, pool_slots)
    return max(pool_slots - NOT_FOR_PROMPTS, 0) if plan is None else plan.longest()


def is_longer_than(pool_slots: int, num_tokens: int) -> bool:
    """Whether SGLang would refuse a prompt for its length, so that it has to shrink while it is prefilled."""
    return num_tokens > pool_slots - NOT_FOR_PROMPTS


def show_bytes(amount: float) -> str:
    """Format an amount of memory in a readable unit."""
    return ByteSize(amount).human_readable(decimal=True, separator=" ")
