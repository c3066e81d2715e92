"""Start-up checks before anything is loaded: flags, pool size, port, files, folders.

Used by ``sgl-kvevict serve`` and SGLang's launcher; imports neither SGLang nor torch. Checks that need the model are in
``refusals.py``. Every ``*_reasons`` function returns one sentence per reason.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import ConfigError, KVEvictError
from sgl_kvevict.sglang_adapter.compat import BACKEND_NAME

_SLOT_READERS = "it reads KV by token slot, and a compressed prefix has none"
_ELSEWHERE = "a rank attends to a part of the tokens, and the entries of a span lie in the pool of one rank"
_LAYOUT = "head slots are numbered as the stock pool lays out layers, slots and heads"

FLAGS: dict[str, tuple[object, str]] = {
    "disable_radix_cache": (False, "there would be no prefixes to compress"),
    "page_size": (1, "spans are packed into single token slots"),
    "enable_hierarchical_cache": (False, _SLOT_READERS),
    "enable_lmcache": (False, _SLOT_READERS),
    "enable_flexkv": (False, _SLOT_READERS),
    "enable_hisparse": (False, _SLOT_READERS),
    "enable_unified_cache_external_linker": (False, _SLOT_READERS),
    "enable_return_routed_experts": (False, _SLOT_READERS),
    "disaggregation_mode": ("null", _SLOT_READERS),
    "is_embedding": (False, "its answers are made of whole prompts, and scoring passes would get some"),
    "dllm_algorithm": (None, "diffusion decoding attends in both directions"),
    "pp_size": (
        1,
        "a stage has the KV of its own layers only, and would keep other tokens in other slots than the rest",
    ),
    "attn_cp_size": (1, _ELSEWHERE),
    "dcp_size": (1, _ELSEWHERE),
    "enable_two_batch_overlap": (False, "a step is planned before the previous result is processed"),
    "enable_pdmux": (False, "a decode step would read slots that are rewritten on the stream of prefills"),
    "enable_streaming_session": (False, "a session's turns have no node in the tree, so no path to read"),
    "enable_unified_memory": (False, _LAYOUT),
    "enable_page_major_kv_layout": (False, _LAYOUT),
    "enable_kv_cache_sharding": (False, _LAYOUT),
    "enable_multi_layer_eagle": (
        False,
        "each draft layer has a pool of its own, and a segment a shadow for one of them",
    ),
    "prefill_only_disable_kv_cache": (False, "there would be no KV to compress"),
    "kv_canary": ("none", "it patches the pool's buffers"),
    "enable_torch_compile": (False, "the attention backend is not traceable"),
    "enable_deterministic_inference": (False, "results depend on the batch"),
}
"""Fields of SGLang's ``ServerArgs``: the only supported value, and what goes wrong with others."""
MODEL_KEYS = {
    "index_topk": "the model chooses the tokens that a query reads by an index cache (DSA), which spans do not hold",
    "is_encoder_decoder": "the model is an encoder-decoder: its decoder attends to what no prefix holds",
    "attention_chunk_size": "the model attends within chunks, and a span would show a query those before its own",
    "attn_logit_softcapping": "the model caps its attention logits, which our kernels do not",
}
"""Keys of a model's ``config.json`` that stand for attention that is not supported, if they have a value."""
WHAT_WORKS = (
    "what works: Llama, Mistral, Qwen2, Qwen3, Gemma 3, gpt-oss and others (docs/models.md); stock SGLang serves this "
    f"model without --radix-cache-backend {BACKEND_NAME} and --attention-backend {BACKEND_NAME}"
)
MAX_DRAFTS = 64
"""Draft tokens of a request: ``attention.batch.MAX_TREE_TOKENS``, without importing torch."""
BACKENDS = ("radix_cache_backend", "attention_backend", "prefill_attention_backend", "decode_attention_backend")


def flag_reasons(value_of: Callable[[str], object]) -> list[str]:
    """Unsupported server arguments; ``value_of``: value of a field of ``ServerArgs``, None if omitted."""
    given = {field: value for field in FLAGS if (value := value_of(field)) not in (None, FLAGS[field][0])}
    return [
        f"--{field.replace('_', '-')} is {value!r}, only {FLAGS[field][0]!r} is supported: {FLAGS[field][1]}"
        for field, value in given.items()
    ]


ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
"""Of speculative decoding, those that work over compressed prefixes."""
_DRAFTS = "its drafts read KV of compressed tokens, and nothing keeps a shadow of it for them"


def speculation_reasons(value_of: Callable[[str], object], config: KVEvictConfig) -> list[str]:
    """Unsupported settings of speculative decoding; ``value_of`` as in :func:`flag_reasons`."""
    given = value_of("speculative_algorithm")
    if given is None:
        return []
    algorithm, reasons = str(given).upper(), []
    if algorithm not in ALGORITHMS:
        allowed = ", ".join(map(repr, ALGORITHMS))
        reasons.append(f"--speculative-algorithm is {given!r}, only {allowed} are supported: {_DRAFTS}")
    backend = value_of("speculative_draft_attention_backend")
    if backend not in (None, BACKEND_NAME):
        reasons.append(
            f"--speculative-draft-attention-backend is {backend!r}, only {BACKEND_NAME!r} is supported: {_SLOT_READERS}"
        )
    num_drafts = value_of("speculative_num_draft_tokens")
    if num_drafts is not None and not 1 <= int(str(num_drafts)) <= MAX_DRAFTS:
        reasons.append(f"--speculative-num-draft-tokens is {num_drafts}; allowed: 1 to {MAX_DRAFTS}")
    if value_of("attn_dp_size") not in (None, 1):
        reasons.append("--attn-dp-size: with --speculative-algorithm a batch is padded with drafts of no request")
    if config.decode_block is not None:
        reasons.append(
            "decode_block: a verification step writes draft tokens behind the answer, and its queries are not observed "
            "(leave out --speculative-algorithm or decode_block)"
        )
    return reasons


def attention_backends(value_of: Callable[[str], object]) -> set[object]:
    """Attention backends of prefills and decode steps; argument as in :func:`flag_reasons`."""
    attention = value_of("attention_backend")
    return {value_of(f"{phase}_attention_backend") or attention for phase in ("prefill", "decode")}


def backend_reasons(value_of: Callable[[str], object]) -> list[str]:
    """Reasons if radix cache or attention are not ours; argument as in :func:`flag_reasons`."""
    radix, reasons = value_of("radix_cache_backend"), []
    if radix != BACKEND_NAME:
        reasons.append(
            f"--attention-backend {BACKEND_NAME} needs the matching --radix-cache-backend {BACKEND_NAME}, got {radix!r}"
        )
    if others := attention_backends(value_of) - {BACKEND_NAME}:
        got = ", ".join(map(repr, others))
        reasons.append(f"the attention backend is {got}; start with --attention-backend {BACKEND_NAME}")
    return reasons


def model_file_reasons(folder: Path) -> list[str]:
    """Unsupported features that a model's ``config.json`` shows, and what works instead; [] if it is not JSON."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    parts = (
        [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
        if isinstance(config, dict)
        else []
    )
    reasons = [reason for key, reason in MODEL_KEYS.items() if any(part.get(key) for part in parts)]
    return [*reasons, WHAT_WORKS] if reasons else []


def pool_size_reasons(num_tokens: object, config: KVEvictConfig) -> list[str]:
    """Reason if a pool (``--max-total-tokens``) is too small for any prompt that would be compressed."""
    least = config.min_prefix_tokens + config.tail_tokens
    try:
        if num_tokens is None or int(str(num_tokens)) >= least:
            return []
    except ValueError:
        pass
    return [
        f"--max-total-tokens: got {num_tokens!r}; allowed: an integer >= {least} (min_prefix_tokens + tail_tokens, the "
        "shortest prompt that is compressed)"
    ]


def port_reasons(host: str, port: object) -> list[str]:
    """Reason if the HTTP server cannot listen on the address."""
    try:
        number = int(str(port))
    except ValueError:
        number = -1
    if not 1 <= number <= 65535:
        return [f"--port: got {port!r}; allowed: 1 to 65535"]
    error = _bind_error(host, number)
    return [] if error is None else [f"--port: {number} on {host} cannot be bound ({error}); allowed: a free port"]


def resource_reasons(config: KVEvictConfig) -> list[str]:
    """Files, folders and the socket of the configuration that cannot be used."""
    reasons = []
    if config.store is not None:
        reasons += _store_reasons(config.store)
    if config.score_weights not in (None, "auto"):
        reasons += _weights_reasons(Path(config.score_weights).expanduser())
    if config.score_texts is not None:
        reasons += _texts_reasons(config.score_texts)
    if config.events is not None:
        reasons += _socket_reasons(config.events.endpoint)
    return reasons


def _weights_reasons(path: Path) -> list[str]:
    """Reason if a file of learned scores cannot be read, or does not exist and could not be written."""
    from sgl_kvevict.distill.files import check_format

    if not path.exists():
        return output_reasons("score_weights", path)
    try:
        check_format(path)
    except ConfigError as error:
        return [f"score_weights: {error}"]
    return []


def _texts_reasons(folder: str) -> list[str]:
    """Reason if scores cannot be learned from the texts of a folder."""
    from sgl_kvevict.distill.texts import passages_of

    if not Path(folder).expanduser().is_dir():
        return [f"score_texts: got {folder!r}; allowed: an existing folder, or null"]
    try:
        passages_of(folder)
    except ConfigError as error:
        return [str(error)]
    return []


def output_reasons(name: str, path: Path) -> list[str]:
    """Reason if the file that an option names could not be written; its folder may not exist yet."""
    error = "it is a folder" if path.is_dir() else write_error(path.parent)
    return [] if error is None else [f"{name}: {str(path)!r} cannot be written ({error}); allowed: a path in a folder"]


def write_error(folder: Path) -> str | None:
    """Return why a folder, which may not exist yet, is not writable; None if it is."""
    try:
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            return f"{folder} is not a folder"
        with tempfile.TemporaryDirectory(dir=folder):
            return None
    except (OSError, ValueError) as error:  # ValueError: a NUL
        return str(getattr(error, "strerror", None) or error)


def _store_reasons(store: str) -> list[str]:
    if "://" not in store:
        error = write_error(Path(store).expanduser())
        return (
            []
            if error is None
            else [f"store: {store!r} cannot be made or written ({error}); allowed: a folder, or a URL"]
        )
    from sgl_kvevict.store import open_backend

    try:
        open_backend(store)
    except KVEvictError as error:
        return [str(error)]
    return []


def _socket_reasons(address: str) -> list[str]:
    if address.startswith("ipc:"):
        error = write_error(Path(address.removeprefix("ipc://")).parent)
    else:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        error = _bind_error("" if host == "*" else host.strip("[]"), int(port))
    if error is None:
        return []
    return [f"events.endpoint: {address!r} cannot be bound ({error}); allowed: a free address"]


def _bind_error(host: str, port: int) -> str | None:
    """Return why a TCP port cannot be bound; None if it can. Connections in TIME_WAIT do not count."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None
