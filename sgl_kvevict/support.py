"""What is not served, and why: one table for models, settings, pools and machines.

A row has a name, a condition and a sentence, which names the field, its value and what is allowed; ``{f.x}`` in it is
what the facts say of x. Facts are gathered by :mod:`sgl_kvevict.sglang_adapter.start_facts`, ``model_facts`` beside it
and :mod:`sgl_kvevict.attention.kernel_facts`, so that this module needs neither SGLang nor torch. There are two
moments, each with a record of what is known by then:

===========  ===================  ==================================================================================
table        facts                evaluated by
===========  ===================  ==================================================================================
BEFORE_LOAD  :class:`BeforeLoad`  ``sgl-kvevict serve``; the process that starts servers; and SETTINGS, a part of
                                  it, by each scheduler, because SGLang may override what was given
AFTER_LOAD   :class:`AfterLoad`   the attention of the model, before it compiles kernels; and ATTENTION, a part of
                                  it, by that of a draft model
===========  ===================  ==================================================================================

KERNELS, the part of AFTER_LOAD that needs no SGLang, also guards each implementation of attention; MACHINE is what
``sgl-kvevict check`` asks of a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kvevict_kernels.row_sizes import GROUP, MAX_ROWS, ROWS_IN_PLACE
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.machine import FP8_CAPABILITY, Check

if TYPE_CHECKING:
    from sgl_kvevict.config import Bits, KVEvictConfig
    from sgl_kvevict.policies.policy import Policy

F = TypeVar("F")
Table = Mapping[str, tuple[Callable[[F], object], str]]
"""Rows by name: whether a row applies to facts ``f``, and its sentence, in which ``{f.x}`` is replaced."""

BACKEND_NAME = "kvevict"
"""Of our radix cache and our attention, as SGLang's flags select them."""


def reasons(table: Table[F], facts: F) -> list[str]:
    """The sentences of all rows that apply; a sentence may stand for several, one per line."""
    applying = [sentence.format(f=facts) for applies, sentence in table.values() if applies(facts)]
    return [line for sentence in applying for line in sentence.splitlines()]


def require(table: Table[F], facts: F) -> None:
    """Raise :class:`UnsupportedSetupError` with the sentences of all rows that apply, if there are any."""
    # All at once: a start takes minutes, and one reason a start would cost as many of them.
    if found := reasons(table, facts):
        raise UnsupportedSetupError(found)


# ---- facts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HasTraits:
    """Facts of a model; ``traits``: names in :data:`MODELS` and :data:`LAYERS` that it is known to have."""

    traits: frozenset[str] = field(default=frozenset(), kw_only=True)


@dataclass(frozen=True)
class BeforeLoad(HasTraits):
    """What is known before anything is loaded; ``facts[name]`` is a field of SGLang's ``ServerArgs``, None if omitted.

    Attributes:
        value_of: returns these fields.
        config: the plugin's configuration.
        address: host and port on which the server will listen; None: it will not.
        errors: why something cannot be used, by names of :data:`RESOURCES`.
    """

    value_of: Callable[[str], object]
    config: KVEvictConfig
    address: tuple[str, object] | None = None
    errors: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> object:
        return self.value_of(name)

    @property
    def other_backends(self) -> str:
        """Attention backends that are not ours."""
        return ", ".join(map(repr, attention_backends(self.value_of) - {BACKEND_NAME}))


def attention_backends(value_of: Callable[[str], object]) -> set[object]:
    """Attention backends of prefills and decode steps; ``value_of`` as in :class:`BeforeLoad`."""
    attention = value_of("attention_backend")
    return {value_of(f"{phase}_attention_backend") or attention for phase in ("prefill", "decode")}


@dataclass(frozen=True)
class Kernels:
    """What decides whether an implementation of attention runs on a device, and has kernels for a KV pool.

    Attributes:
        attention: as configured: "auto", "numba", "torch", "triton" or "flashinfer".
        chosen: what the name stands for on the device.
        device: "cpu" or "cuda"; others are refused.
        numba_error: why numba cannot compute; None: it can, or is not chosen.
        is_installed: the package of the implementation is there.
        dtype: of the pool, as torch prints it, without "torch."; None: nothing is known of the pool yet.
        head_dim: numbers in a row of the pool.
        is_latent: rows are latents (MLA).
        capability: of a GPU that is to read float8; else None.
    """

    attention: str
    chosen: str
    device: str
    numba_error: str | None = None
    is_installed: bool = True
    dtype: str | None = None
    head_dim: int = 0
    is_latent: bool = False
    capability: tuple[int, int] | None = None

    @property
    def reads(self) -> str | None:
        """The implementation that is to read the pool; None: nothing is known of the pool yet."""
        return None if self.dtype is None else self.chosen

    @property
    def pool_dtype(self) -> str:
        """The end of a sentence."""
        hint = " (start with --kv-cache-dtype auto)" if str(self.dtype).startswith("float8") else ""
        return f"the pool's dtype is {self.dtype}{hint}"

    @property
    def in_words(self) -> tuple[str, str]:
        """The other device, and the names of attention that may be configured on this one."""
        return IN_WORDS[self.device]


@dataclass(frozen=True)
class AfterLoad(Kernels, HasTraits):
    """What is known once the model and its pools are there, and before anything of ours is built on them.

    Attributes:
        config: the plugin's configuration, as its policy spells it out.
        policy: None: nothing is compressed.
        value_of: as in :class:`BeforeLoad`.
        is_selected: our radix cache is selected, too.
        pool_class: of the full-attention pool, and whether its buffers are one arena.
        windows_class: of the pool of layers with a window, the same; None: they have no pool of their own.
        page_size: of the full-attention pool.
        layout: of the full-attention pool; "nhd" is one slot's heads side by side.
        has_full_layers: some layers have no window.
        windows: as in :attr:`KVGeometry.windows`.
        has_states: some layers are recurrent.
        is_multimodal: the model takes images, ...
        sees_later: ... whose tokens attend to later ones.
        prefill_graphs: SGLang's backend of CUDA graphs of prefills; "disabled": there are none.
        decode_graphs: of decode steps.
        has_glue_graph: one graph is to record what steps are planned from.
        pooling: of rows by the policy on a GPU: its width, and the widest that shared memory allows.
        num_head_slots: of the full-attention pool.
        has_weights: the model's are not random (``--load-format dummy``).
        has_texts: the model's tokenizer may have files.
        machine: checks of the machine that the scheduler runs on.
    """

    config: KVEvictConfig = field(kw_only=True)
    policy: Policy | None = field(kw_only=True)
    value_of: Callable[[str], Any] = field(kw_only=True)
    is_selected: bool = True
    pool_class: tuple[str, bool] = ("ArenaKVPool", True)
    windows_class: tuple[str, bool] | None = None
    page_size: int = 1
    layout: str = "nhd"
    has_full_layers: bool = True
    windows: tuple[int, ...] = ()
    has_states: bool = False
    is_multimodal: bool = False
    sees_later: bool = False
    prefill_graphs: str = "disabled"
    decode_graphs: str = "disabled"
    has_glue_graph: bool = False
    pooling: tuple[int, int] = (0, 0)
    num_head_slots: int = 0
    has_weights: bool = True
    has_texts: bool = True
    machine: tuple[Check, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.value_of(name)

    @property
    def why_16_bits(self) -> list[str]:
        """Why all rows have 16 bits, whatever ``bits`` says; [] if they need not."""
        return [] if self.policy is None else reasons(BITS, self)

    @property
    def bits(self) -> Bits:
        """Of rows of compressed prefixes: ``bits``, or 16 where that is all that can be read or written."""
        return 16 if self.policy is None or self.why_16_bits else self.config.bits

    @property
    def why_whole_answers(self) -> list[str]:
        """Why answers stay uncompressed while they are generated, whatever ``answer_block`` says; [] if they do not."""
        return [] if self.policy is None or self.config.answer_block is None else reasons(ANSWERS, self)

    @property
    def has_places(self) -> bool:
        """Prompts continue a cached prefix only where a window, or a state, is stored."""
        return self.windows_class is not None or self.has_states

    @property
    def kind(self) -> str:
        """What such a model has."""
        return "recurrent layers" if self.has_states else "a KV pool for layers with a sliding window"

    @property
    def speculates(self) -> bool:
        """There are drafts."""
        return self["speculative_algorithm"] is not None

    @property
    def narrowest(self) -> int:
        """Tokens of the narrowest window in the full-attention pool; 0 without windows."""
        return min(filter(None, self.windows), default=0)

    @property
    def missing(self) -> str:
        """What the machine lacks, one sentence per line."""
        return "\n".join(reason for check in self.machine for reason in reasons(MACHINE, check))


# ---- rows ------------------------------------------------------------------------------------------------------------


def _flag(name: str, allowed: object, why: str) -> tuple[Callable[[BeforeLoad], object], str]:
    sentence = f"--{name.replace('_', '-')} is {{f[{name}]!r}}, only {allowed!r} is supported: {why}"
    return lambda f: f[name] not in (None, allowed), sentence


def _is_outside(value: object, least: int, most: int | None = None) -> bool:
    """Whether a value that was given is no integer in a range; None: it was not given."""
    try:
        return value is not None and not least <= int(str(value)) <= (int(str(value)) if most is None else most)
    except ValueError:
        return True


def _trait(name: str, sentence: str) -> tuple[Callable[[HasTraits], object], str]:
    return lambda f: name in f.traits, sentence


# A row is its name and condition on one line, and its sentence below.
# fmt: off
BACKENDS = ("radix_cache_backend", "attention_backend", "prefill_attention_backend", "decode_attention_backend")
MAX_DRAFTS = 64
"""Draft tokens of a request: bits of an int64, by which the nodes of a tree see each other."""
ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
"""Of speculative decoding, those that work over compressed prefixes."""

_SLOT_READERS = "it reads KV by token slot, and a compressed prefix has none"
_OTHER_TIER = f"{_SLOT_READERS}; host_bytes and store keep compressed prefixes instead"
_ELSEWHERE = "a rank attends to a part of the tokens, and the entries of a span lie in the pool of one rank"
_LAYOUT = "head slots are numbered as the stock pool lays out layers, slots and heads"

FLAGS: dict[str, tuple[object, str]] = {
    "disable_radix_cache": (False, "there would be no prefixes to compress"),
    "page_size": (1, "spans are packed into single token slots"),
    "enable_hierarchical_cache": (False, _OTHER_TIER),
    "enable_lmcache": (False, _OTHER_TIER),
    "enable_flexkv": (False, _SLOT_READERS),
    "enable_hisparse": (False, _SLOT_READERS),
    "enable_unified_cache_external_linker": (False, _SLOT_READERS),
    "enable_return_routed_experts": (False, _SLOT_READERS),
    "disaggregation_mode": ("null", _SLOT_READERS),
    "is_embedding": (False, "its answers are made of whole prompts, of which nothing is read again"),
    "dllm_algorithm": (None, "diffusion decoding attends in both directions"),
    "pp_size": (1,
        "a stage has the KV of its own layers only, and would keep other tokens in other slots than the rest"),
    "attn_cp_size": (1, _ELSEWHERE),
    "dcp_size": (1, _ELSEWHERE),
    "enable_two_batch_overlap": (False, "a step is planned before the previous result is processed"),
    "enable_pdmux": (False, "a decode step would read slots that are rewritten on the stream of prefills"),
    "enable_streaming_session": (False, "a session's turns have no node in the tree, so no path to read"),
    "enable_unified_memory": (False, _LAYOUT),
    "enable_page_major_kv_layout": (False, _LAYOUT),
    "enable_kv_cache_sharding": (False, _LAYOUT),
    "enable_multi_layer_eagle": (False,
        "each draft layer has a pool of its own, and a segment a shadow for one of them"),
    "prefill_only_disable_kv_cache": (False, "there would be no KV to compress"),
    "kv_canary": ("none", "it patches the pool's buffers"),
    "enable_torch_compile": (False, "the attention backend is not traceable"),
    "enable_deterministic_inference": (False, "results depend on the batch"),
}
"""Fields of SGLang's ``ServerArgs``: the only supported value, and what goes wrong with others."""

IN_WORDS = {
    "cpu": ("a CUDA device", "'auto', 'numba', 'torch'"),
    "cuda": ("the CPU", "'auto', 'triton', 'flashinfer'"),
}
"""By device: the other one, and the names of attention that may be configured."""
ON_CPU = ("numba", "torch")
"""Implementations for a CPU; the others are for a GPU."""
PLANNED_ON_HOST = ("flashinfer",)
"""Implementations for a GPU whose steps no CUDA graph can record."""
MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 576
FLASHINFER_HEAD_DIMS = (64, 128, 256)
DTYPES_16 = ("bfloat16", "float16")
FP8 = "float8_e4m3fn"

SETTINGS: Table[BeforeLoad] = {
    "radix_cache_backend": (lambda f: f["radix_cache_backend"] != BACKEND_NAME,
        f"--attention-backend {BACKEND_NAME} needs the matching --radix-cache-backend {BACKEND_NAME}, got "
        "{f[radix_cache_backend]!r}"),
    "attention_backend": (lambda f: f.other_backends,
        f"the attention backend is {{f.other_backends}}; start with --attention-backend {BACKEND_NAME}"),
    **{name: _flag(name, allowed, why) for name, (allowed, why) in FLAGS.items()},
    "speculative_algorithm": (
        lambda f: f["speculative_algorithm"] and str(f["speculative_algorithm"]).upper() not in ALGORITHMS,
        f"--speculative-algorithm is {{f[speculative_algorithm]!r}}, only {', '.join(map(repr, ALGORITHMS))} are "
        "supported: its drafts read KV of compressed tokens, and nothing keeps a shadow of it for them"),
    "speculative_draft_attention_backend": (
        lambda f: f["speculative_algorithm"] and f["speculative_draft_attention_backend"] not in (None, BACKEND_NAME),
        f"--speculative-draft-attention-backend is {{f[speculative_draft_attention_backend]!r}}, only {BACKEND_NAME!r} "
        f"is supported: {_SLOT_READERS}"),
    "speculative_num_draft_tokens": (
        lambda f: f["speculative_algorithm"] and _is_outside(f["speculative_num_draft_tokens"], 1, MAX_DRAFTS),
        f"--speculative-num-draft-tokens is {{f[speculative_num_draft_tokens]}}; allowed: 1 to {MAX_DRAFTS}"),
    "attn_dp_size with drafts": (lambda f: f["speculative_algorithm"] and f["attn_dp_size"] not in (None, 1),
        "--attn-dp-size: with --speculative-algorithm a batch is padded with drafts of no request"),
    "elastic_ep_backend with adapters": (lambda f: f["elastic_ep_backend"] and (f["enable_lora"] or f["lora_paths"]),
        "--elastic-ep-backend: with LoRA adapters SGLang writes the size of the group behind the adapter's id in the "
        "key of a prefix, which tells prefixes of adapters by its end"),
}
"""Settings that are refused whatever the model is."""

MODELS = {
    "index_topk": "the model chooses the tokens that a query reads by an index cache (DSA), which spans do not hold",
    "is_encoder_decoder": "the model is an encoder-decoder: its decoder attends to what no prefix holds",
    "attention_chunk_size": "the model attends within chunks, and a span would show a query those before its own",
    "attn_logit_softcapping": "the model caps its attention logits, which our kernels do not",
    "v_head_dim": "the model's keys and values have different widths, and a head slot has one",
}
"""Attention that is not served. The names are keys of ``config.json`` that stand for it if they have a value, except
``v_head_dim``, which needs SGLang's reading of the file."""
WHAT_WORKS = (
    "what works: Llama, Mistral, Qwen2, Qwen3, Gemma 3, gpt-oss and others (docs/models.md); stock SGLang serves this "
    f"model without --radix-cache-backend {BACKEND_NAME} and --attention-backend {BACKEND_NAME}"
)

MODEL: Table[HasTraits] = {
    **{name: _trait(name, sentence) for name, sentence in MODELS.items()},
    "what works": (lambda f: f.traits & MODELS.keys(), WHAT_WORKS),
}

RESOURCES: Table[BeforeLoad] = {
    "max_total_tokens": (lambda f: _is_outside(f["max_total_tokens"], f.config.min_prefix_tokens),
        "--max-total-tokens: got {f[max_total_tokens]!r}; allowed: an integer >= {f.config.min_prefix_tokens} "
        "(min_prefix_tokens, the shortest prompt that is compressed)"),
    "drafts on a CPU": (lambda f: f["device"] == "cpu" and f["speculative_algorithm"] and "drafts" in f.errors,
        "--speculative-algorithm: SGLang {f.errors[drafts]} has no workers of drafts on a CPU; a later version has"),
    "store": (lambda f: "store" in f.errors,
        "store: {f.config.store!r} cannot be made or written ({f.errors[store]}); allowed: a folder, or a URL"),
    "store URL": (lambda f: "store URL" in f.errors, "{f.errors[store URL]}"),
    "score_weights": (lambda f: "score_weights" in f.errors,
        "score_weights: {f.config.score_weights!r} cannot be written ({f.errors[score_weights]}); allowed: a path "
        "in a folder"),
    "score_weights file": (lambda f: "score_weights file" in f.errors, "score_weights: {f.errors[score_weights file]}"),
    "score_texts folder": (lambda f: "score_texts folder" in f.errors,
        "score_texts: got {f.config.score_texts!r}; allowed: an existing folder, or null"),
    "score_texts": (lambda f: "score_texts" in f.errors, "{f.errors[score_texts]}"),
    "events.endpoint": (lambda f: "events.endpoint" in f.errors,
        "events.endpoint: {f.config.events.endpoint!r} cannot be bound ({f.errors[events.endpoint]}); allowed: a "
        "free address"),
    "port number": (lambda f: f.address is not None and _is_outside(f.address[1], 1, 65535),
        "--port: got {f.address[1]!r}; allowed: 1 to 65535"),
    "port": (lambda f: f.address is not None and "port" in f.errors,
        "--port: {f.address[1]} on {f.address[0]} cannot be bound ({f.errors[port]}); allowed: a free port"),
}
"""Files, folders, the port and the socket."""

BEFORE_LOAD: Table[BeforeLoad] = {**MODEL, **SETTINGS, **RESOURCES}

MACHINE: Table[Check] = {
    "part": (lambda f: f.state == "missing", "{f.name}: {f.found} ({f.mend})"),
}
"""What a machine may not lack."""

IMPLEMENTATION: Table[Kernels] = {
    "device": (lambda f: f.device not in IN_WORDS, "the device is {f.device!r}; attention runs on 'cpu' and 'cuda'"),
    "attention on another device": (lambda f: f.device in IN_WORDS and (f.chosen in ON_CPU) != (f.device == "cpu"),
        "attention is {f.attention!r}, which runs on {f.in_words[0]} only; the device is {f.device!r} (allowed: "
        "{f.in_words[1]})"),
    "numba": (lambda f: f.device == "cpu" and f.attention == "numba" and f.numba_error is not None,
        "attention is {f.attention!r}, but {f.numba_error} ('torch' runs everywhere)"),
    "package of attention": (lambda f: f.device == "cuda" and f.chosen not in ON_CPU and not f.is_installed,
        "attention is {f.attention!r}, but the package {f.chosen} is not installed"),
}
"""Whether a configured implementation runs on a device at all."""
KERNELS: Table[Kernels] = {
    "latents of triton": (lambda f: f.reads == "triton" and f.is_latent and f.head_dim > MAX_LATENT_DIM,
        f"attention 'triton' needs latents of at most {MAX_LATENT_DIM} numbers, the rotated key included; the "
        "model's have {f.head_dim}"),
    "head_dim of triton": (lambda f: f.reads == "triton" and not f.is_latent and f.head_dim > MAX_HEAD_DIM,
        f"attention 'triton' needs a head_dim of at most {MAX_HEAD_DIM}; the model's is {{f.head_dim}}"),
    "float8 latents of triton": (lambda f: f.reads == "triton" and f.is_latent and f.dtype == FP8,
        "attention 'triton' needs 16-bit latents (MLA): SGLang writes float8 ones without the layers' scales, by "
        "which our kernels multiply; {f.pool_dtype}"),
    "dtype of triton": (lambda f: f.reads == "triton" and f.device == "cuda" and f.dtype not in (*DTYPES_16, FP8),
        "attention 'triton' needs bfloat16, float16 or fp8_e4m3 KV on a GPU; {f.pool_dtype}"),
    "float8 on an older GPU": (
        lambda f: f.reads == "triton" and f.dtype == FP8 and f.capability and f.capability < FP8_CAPABILITY,
        "fp8_e4m3 KV needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell); this one's is "
        "{f.capability[0]}.{f.capability[1]} (start with --kv-cache-dtype auto)"),
    "latents of flashinfer": (lambda f: f.reads == "flashinfer" and f.is_latent,
        "attention is 'flashinfer', and the model keeps latents (MLA): the kernels that we call would read keys and "
        "values as rows of one width, which a latent's are not; 'triton' reads them"),
    "head_dim of flashinfer": (
        lambda f: f.reads == "flashinfer" and not f.is_latent and f.head_dim not in FLASHINFER_HEAD_DIMS,
        "attention 'flashinfer' needs a head_dim of 64, 128 or 256; the model's is {f.head_dim}"),
    "dtype of flashinfer": (lambda f: f.reads == "flashinfer" and not f.is_latent and f.dtype not in DTYPES_16,
        "attention 'flashinfer' needs bfloat16 or float16 KV; {f.pool_dtype}"),
    "dtype on a CPU": (lambda f: f.reads in ON_CPU and f.dtype not in (*DTYPES_16, "float32"),
        "attention {f.attention!r} on a CPU needs bfloat16, float16 or float32 KV; {f.pool_dtype}"),
}
"""Whether it has kernels for the pool."""
LAYERS = {
    "logit_cap": "a layer caps its attention logits, which our kernels do not",
    "attn_type": "a layer's attention is not causal self-attention, and a span holds what is before a query",
}
"""Attention that only the layers of the loaded model show."""
ATTENTION: Table[AfterLoad] = {
    "radix cache beside our attention": (lambda f: not f.is_selected,
        f"--attention-backend {BACKEND_NAME} needs the matching --radix-cache-backend {BACKEND_NAME}"),
    "arena": (lambda f: f.is_selected and not f.pool_class[1],
        "the KV pool is a {f.pool_class[0]} whose buffers are not one arena"),
    "arena of windows": (lambda f: f.windows_class and not f.windows_class[1],
        "the KV pool of layers with a window is a {f.windows_class[0]}, not one arena"),
    **IMPLEMENTATION,
    "cuda_graph_backend_prefill": (lambda f: f.device == "cuda" and f.prefill_graphs != "disabled",
        "CUDA graphs of prefills are on, and a captured prefill cannot follow requests to other spans: start with "
        "--cuda-graph-backend-prefill disabled"),
    "cuda_graph_backend_decode breakable": (lambda f: f.device == "cuda" and f.decode_graphs == "breakable",
        "--cuda-graph-backend-decode is 'breakable': its attention runs without request ids (allowed: 'full', "
        "'disabled')"),
    "cuda_graph_backend_decode full": (
        lambda f: f.device == "cuda" and f.decode_graphs == "full" and f.chosen in PLANNED_ON_HOST,
        "attention is {f.chosen!r}, whose plans are made on the host and cannot be captured: start with "
        "--cuda-graph-backend-decode disabled, or with another attention"),
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": (lambda f: f.device == "cuda" and f.has_glue_graph,
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH is set, which would record one batch's spans for all batches"),
    "machine": (lambda f: f.missing, "{f.missing}"),
    **{name: _trait(name, sentence) for name, sentence in LAYERS.items()},
    **KERNELS,
    "speculative_algorithm with a pool of windows": (lambda f: f.speculates and f.windows_class is not None,
        "--speculative-algorithm: the model has a KV pool for layers with a sliding window, whose steps are planned "
        "for one new token a request, not for drafts"),
    "speculative_num_draft_tokens with windows": (
        lambda f: f.speculates and 0 < f.narrowest < (f["speculative_num_draft_tokens"] or 0),
        "--speculative-num-draft-tokens is {f[speculative_num_draft_tokens]}; allowed: at most "
        "{f.narrowest}, the narrowest window"),
}
"""What attention needs, of a model and of its draft model."""

BITS: Table[AfterLoad] = {
    "whole": (lambda f: f.config.budget == 1,
        "budget is 1.0, so nothing is compressed"),
    "merging": (lambda f: f.policy is not None and f.policy.merger is not None,
        "policy {f.policy.name!r} merges rows, and sums of rows with few bits would lose more each time"),
    "latents": (lambda f: f.is_latent, "the model keeps latents (MLA), for which fewer bits were never measured"),
    "float32": (lambda f: f.dtype == "float32",
        "the pool's rows have 32 bits, of which four of 4 bits would be half: start with --kv-cache-dtype bfloat16"),
    "float8": (lambda f: f.dtype == FP8, "the pool's rows have 8 bits already (--kv-cache-dtype)"),
    "flashinfer": (lambda f: f.chosen == "flashinfer", "attention 'flashinfer' reads rows of 16 bits only"),
    "windows": (lambda f: f.narrowest,
        "layers with sliding windows share the pool, and their entries go by position, not by worth"),
    "head_dim": (lambda f: not f.is_latent and f.head_dim % GROUP,
        f"kernels read {GROUP} numbers of a row at once, and the model's head_dim is {{f.head_dim}}"),
    "rows": (lambda f: f.num_head_slots * ROWS_IN_PLACE > MAX_ROWS,
        "the pool has {f.num_head_slots} head slots, and numbers of their rows would not fit 32 bits"),
    "weights": (lambda f: not f.has_weights,
        "the weights are random (--load-format dummy), so that keys and values have no statistics"),
    "tokenizer": (lambda f: not f.has_texts and f.config.score_weights in ("auto", None),
        "statistics of keys and values are learned from texts, and the model's folder has no tokenizer"),
}
"""Why rows of compressed prefixes have 16 bits: ends of sentences."""

FROM_THE_CACHE = frozenset({"keys", "values"})
"""Of ``policies.signals.Signal``: what any range has, without importing torch."""
ANSWERS: Table[AfterLoad] = {
    "policy": (lambda f: f.policy and "learned_scores" not in f.policy.needs and f.policy.needs - FROM_THE_CACHE,
        "policy {f.policy.name!r} ranks entries by queries of a prompt"),
    "windows": (lambda f: f.narrowest, "layers with sliding windows share the pool, and nothing may end in a segment"),
    "places": (lambda f: f.has_places, "the model has {f.kind}, whose part of a prefix is at the end of a prompt"),
    "strip_thinking_cache": (lambda f: f["strip_thinking_cache"],
        "--strip-thinking-cache is set, which keeps answers out of the cache"),
}
"""Why answers stay uncompressed until the prompt of the next turn: ends of sentences."""

AFTER_LOAD: Table[AfterLoad] = {
    **ATTENTION,
    **MODEL,
    "images that see later tokens": (lambda f: f.is_multimodal and f.sees_later,
        "an image's tokens attend to later ones of the same image, which causal attention would leave out; "
        "--language-model-only serves the model's text"),
    "windows only": (lambda f: f.windows_class is not None and not f.has_full_layers,
        "every layer of the model has a sliding window and one KV pool: there is nothing to compress"),
    "mamba_radix_cache_strategy": (
        lambda f: f.has_states and f["mamba_radix_cache_strategy"] == "extra_buffer_lazy",
        "--mamba-radix-cache-strategy is 'extra_buffer_lazy', allowed are 'no_buffer' and 'extra_buffer': in its "
        "decode steps a request gives up the state of the prefix that it reads"),
    "speculative_algorithm with states": (lambda f: f.has_states and f.speculates,
        "--speculative-algorithm: the model has recurrent layers, and a verification step leaves a state for each "
        "draft; were the tree given one of a rejected draft, every prompt that continues there would be answered "
        "wrongly, and which one it gets is chosen by kernels that need a GPU"),
    "store of places": (lambda f: f.has_places and f.config.store is not None,
        "store: the model has {f.kind}, whose part of a prefix is not stored"),
    "host_bytes of places": (lambda f: f.has_places and f.config.host_bytes,
        "host_bytes: the model has {f.kind}, whose part of a prefix is not copied to the host"),
    "page_size of the pool": (lambda f: f.page_size != 1,
        "--page-size is {f.page_size}, only 1 is supported: spans are packed into single token slots"),
    "layout of the pool": (lambda f: f.layout != "nhd",
        "the KV pool's layout is {f.layout!r}; only 'nhd' has the heads of a slot side by side"),
    "kernel_size": (lambda f: f.pooling[0] > f.pooling[1],
        "kernel_size is {f.pooling[0]}; with a head_dim of {f.head_dim} this GPU's shared memory allows at "
        "most {f.pooling[1]} (or pooling 'avg', or order 'mean-pool')"),
    "policy with windows": (lambda f: f.narrowest and f.policy is not None and f.policy.merger is not None,
        "policy {f.policy.name!r} merges evicted entries into others, which a layer with a sliding window may not "
        "show any more"),
    "attn_dp_size with states": (lambda f: f["attn_dp_size"] != 1 and f.has_states,
        "--attn-dp-size: the model has recurrent layers, and SGLang makes up requests for ranks that have none, "
        "whose states the tree does not know"),
    "attn_dp_size with captured steps": (
        lambda f: f["attn_dp_size"] != 1 and f.device == "cuda" and f.decode_graphs != "disabled",
        "--attn-dp-size: a rank without requests replays the captured step of the others, and our layout of a step "
        "has at least one request: start with --cuda-graph-backend-decode disabled"),
    "speculative_algorithm with latents": (lambda f: f.is_latent and f.speculates,
        "--speculative-algorithm: drafts of a model with latents (MLA) keep latents, too, and a segment's slots "
        "hold a draft's keys and values"),
}
