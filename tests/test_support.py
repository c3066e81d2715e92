"""The table of what is not served: facts that trigger each row, alone, and its sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.settings import loaded, settings
from sgl_kvevict import support
from sgl_kvevict.config import Bits, KVEvictConfig
from sgl_kvevict.machine import Check
from sgl_kvevict.policies.by_name import build_policy
from sgl_kvevict.support import (
    AFTER_LOAD,
    ANSWERS,
    ATTENTION,
    BEFORE_LOAD,
    BITS,
    FLAGS,
    IMPLEMENTATION,
    KERNELS,
    LAYERS,
    MACHINE,
    MODEL,
    MODELS,
    RESOURCES,
    SETTINGS,
    AfterLoad,
    BeforeLoad,
    Table,
    reasons,
)

EMPTY = re.compile(r"\b(untested|not (yet )?(tested|supported|implemented)|unsupported|yet)\b", re.IGNORECASE)
OURS = {"radix_cache_backend": "kvevict", "attention_backend": "kvevict"}
NGRAM = {"speculative_algorithm": "NGRAM"}
WINDOWS = ("ArenaKVPool", True)
DRAFTS = settings(speculative_algorithm="NGRAM", speculative_num_draft_tokens=12)
ON_CPU = {"attention": "numba", "chosen": "numba", "device": "cpu"}
FLASHINFER = {"attention": "flashinfer", "chosen": "flashinfer"}


def before(config: KVEvictConfig | None = None, address: Any = None, errors: Any = (), **flags: Any) -> BeforeLoad:
    return BeforeLoad((OURS | flags).get, config or KVEvictConfig(), address, dict(errors))


BEFORE: dict[str, BeforeLoad] = {
    **{name: BeforeLoad(OURS.get, KVEvictConfig(), traits=frozenset({name})) for name in MODELS},
    **{name: before(**{name: "other"}) for name in FLAGS},
    "radix_cache_backend": before(radix_cache_backend="lru"),
    "attention_backend": before(decode_attention_backend="triton"),
    "speculative_algorithm": before(speculative_algorithm="DFLASH"),
    "speculative_draft_attention_backend": before(**NGRAM, speculative_draft_attention_backend="triton"),
    "speculative_num_draft_tokens": before(**NGRAM, speculative_num_draft_tokens=65),
    "attn_dp_size with drafts": before(**NGRAM, attn_dp_size=2),
    "elastic_ep_backend with adapters": before(elastic_ep_backend="mooncake", lora_paths=["a=/b"]),
    "max_total_tokens": before(max_total_tokens=3),
    "drafts on a CPU": before(**NGRAM, device="cpu", errors={"drafts": "none"}),
    "store": before(errors={"store": "denied"}),
    "store URL": before(errors={"store URL": "store: got 'ftpx://x'"}),
    "score_weights": before(errors={"score_weights": "denied"}),
    "score_weights file": before(errors={"score_weights file": "the file is cut short"}),
    "score_texts folder": before(errors={"score_texts folder": "it is not there"}),
    "score_texts": before(errors={"score_texts": "score_texts: got 0 passages"}),
    "events.endpoint": before(KVEvictConfig(events={"endpoint": "tcp://*:5557"}), errors={"events.endpoint": "in use"}),
    "port number": before(address=("127.0.0.1", 70000)),
    "port": before(address=("127.0.0.1", 30000), errors={"port": "in use"}),
}
AFTER = {
    **{name: loaded(traits=frozenset({name})) for name in (*MODELS, *LAYERS)},
    "radix cache beside our attention": loaded(is_selected=False),
    "arena": loaded(pool_class=("OtherPool", False)),
    "arena of windows": loaded(windows_class=("OtherPool", False)),
    "device": loaded(device="xpu", chosen="auto"),
    "attention on another device": loaded(device="cpu"),
    "numba": loaded(**ON_CPU, numba_error="the head dimension is 24"),
    "package of attention": loaded(is_installed=False),
    "cuda_graph_backend_prefill": loaded(prefill_graphs="full"),
    "cuda_graph_backend_decode breakable": loaded(decode_graphs="breakable"),
    "cuda_graph_backend_decode full": loaded(decode_graphs="full", **FLASHINFER),
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": loaded(has_glue_graph=True),
    "machine": loaded(
        machine=(Check("GPU", "missing", "none", "add one"), Check("ninja", "missing", "none", "add it"))
    ),
    "latents of triton": loaded(is_latent=True, head_dim=577),
    "head_dim of triton": loaded(head_dim=257),
    "float8 latents of triton": loaded(is_latent=True, dtype="float8_e4m3fn", capability=(9, 0)),
    "dtype of triton": loaded(dtype="float8_e5m2"),
    "float8 on an older GPU": loaded(dtype="float8_e4m3fn", capability=(8, 0)),
    "latents of flashinfer": loaded(is_latent=True, **FLASHINFER),
    "head_dim of flashinfer": loaded(head_dim=80, **FLASHINFER),
    "dtype of flashinfer": loaded(dtype="float32", **FLASHINFER),
    "dtype on a CPU": loaded(dtype="float8_e4m3fn", **ON_CPU),
    "speculative_algorithm with a pool of windows": loaded(own=DRAFTS, windows_class=WINDOWS),
    "speculative_num_draft_tokens with windows": loaded(own=DRAFTS, windows=(0, 11)),
    "images that see later tokens": loaded(is_multimodal=True, sees_later=True),
    "windows only": loaded(windows_class=WINDOWS, has_full_layers=False),
    "mamba_radix_cache_strategy": loaded(own=settings(mamba_radix_cache_strategy="extra_buffer_lazy"), has_states=True),
    "speculative_algorithm with states": loaded(own=DRAFTS, has_states=True),
    "store of places": loaded(KVEvictConfig(store="memory://x"), windows_class=WINDOWS),
    "host_bytes of places": loaded(KVEvictConfig(host_bytes=10**9), has_states=True),
    "page_size of the pool": loaded(page_size=16),
    "layout of the pool": loaded(layout="hnd"),
    "kernel_size": loaded(pooling=(127, 95)),
    "policy with windows": loaded(policy=build_policy("d2o", {}), windows=(8, 0)),
    "attn_dp_size with states": loaded(own=settings(attn_dp_size=2), has_states=True),
    "attn_dp_size with captured steps": loaded(own=settings(attn_dp_size=2), decode_graphs="full"),
    "speculative_algorithm with latents": loaded(own=DRAFTS, is_latent=True),
}
SIXTEEN = {
    "whole": loaded(KVEvictConfig(budget=1.0)),
    "merging": loaded(policy=build_policy("d2o", {})),
    "latents": loaded(is_latent=True, head_dim=576),
    "float32": loaded(dtype="float32", **ON_CPU),
    "float8": loaded(dtype="float8_e4m3fn", capability=(9, 0)),
    "flashinfer": loaded(**FLASHINFER),
    "windows": loaded(windows=(8, 0)),
    "head_dim": loaded(head_dim=80),
    "rows": loaded(num_head_slots=2**30),
    "weights": loaded(has_weights=False),
    "tokenizer": loaded(has_texts=False),
}
WHOLE_ANSWERS = {
    "policy": loaded(policy=build_policy("snapkv", {})),
    "windows": loaded(windows=(8, 0)),
    "places": loaded(has_states=True),
    "strip_thinking_cache": loaded(own=settings(strip_thinking_cache=True)),
}
MACHINES = {"part": Check("GPU", "missing", "torch sees none", "see driver")}
MOMENTS: list[tuple[str, Table[Any], dict[str, Any]]] = [
    ("before", BEFORE_LOAD, BEFORE),
    ("after", AFTER_LOAD, AFTER),
    ("bits", BITS, SIXTEEN),
    ("answers", ANSWERS, WHOLE_ANSWERS),
    ("machine", MACHINE, MACHINES),
]
ROWS = [
    pytest.param(name, table, facts[name], id=f"{moment}: {name}") for moment, table, facts in MOMENTS for name in facts
]


@pytest.mark.parametrize(("name", "table", "facts"), ROWS)
def test_each_row_has_facts_to_which_it_alone_applies(name: str, table: Table[Any], facts: Any) -> None:
    applying = {row for row, (applies, _) in table.items() if applies(facts)} - {"what works"}
    assert applying == {name}
    found = reasons(table, facts)
    assert found[0] and (found[1:] == [support.WHAT_WORKS]) == (name in MODELS)
    assert not [sentence for sentence in found if EMPTY.search(sentence)]  # it says what would break
    assert len(found[0].split()) >= 4 or name == "store URL"
    field = name.split()[0]
    if "_" in field and name not in (*MODELS, *LAYERS):
        assert field in found[0].replace("-", "_")


@pytest.mark.parametrize(("table", "facts"), [(table, facts) for _, table, facts in MOMENTS])
def test_no_row_is_left_out(table: Table[Any], facts: dict[str, Any]) -> None:
    assert table.keys() - {"what works"} == facts.keys()


def test_no_name_stands_for_two_rows() -> None:
    parts = ([MODEL, SETTINGS, RESOURCES], [IMPLEMENTATION, KERNELS, MODEL])
    for whole, tables in zip((BEFORE_LOAD, AFTER_LOAD), parts, strict=True):
        for table in tables:
            assert all(whole[name] is row for name, row in table.items())
    assert len(BEFORE_LOAD) == sum(map(len, parts[0]))
    assert all(AFTER_LOAD[name] is row for name, row in ATTENTION.items())


def test_nothing_is_refused_of_a_plain_model() -> None:
    assert reasons(AFTER_LOAD, loaded()) == reasons(BEFORE_LOAD, before()) == []
    assert reasons(AFTER_LOAD, loaded(**ON_CPU, dtype="float32")) == []


@pytest.mark.parametrize(
    "facts",
    [
        loaded(policy=build_policy("d2o", {})),
        loaded(policy=build_policy("snapkv", {}), windows=(8, 0)),
        loaded(policy=build_policy("distilled", {}), is_latent=True),
        loaded(own=DRAFTS),
        loaded(own=settings(attn_dp_size=2)),
        loaded(has_states=True, decode_graphs="full"),
        loaded(own=settings(attn_dp_size=2), decode_graphs="full", **ON_CPU),
        loaded(own=settings(chunked_prefill_size=None)),
        loaded(windows=(8, 0), has_states=True),
        loaded(decode_graphs="breakable", prefill_graphs="full", **ON_CPU),
        loaded(KVEvictConfig(host_bytes=0), build_policy("snapkv", {}), windows_class=WINDOWS),
        loaded(own=DRAFTS, windows=(0, 12, 40)),
        loaded(windows=(1,), windows_class=WINDOWS),
    ],
)
def test_nothing_is_refused_of_half_of_what_a_row_is_about(facts: AfterLoad) -> None:
    assert reasons(AFTER_LOAD, facts) == []


@pytest.mark.parametrize("facts", SIXTEEN.values(), ids=SIXTEEN)
def test_where_rows_must_have_16_bits_auto_means_16(facts: AfterLoad) -> None:
    policy = facts.policy or build_policy("snapkv", {})
    auto = replace(facts, policy=policy)
    (why,) = auto.why_16_bits
    assert why and auto.config.bits == "auto" and auto.bits == 16


def test_answers_are_compressed_where_nothing_of_a_prompt_is_needed() -> None:
    assert all(loaded(policy=build_policy(name, {})).why_whole_answers == [] for name in ("distilled", "streaming-llm"))
    assert loaded(policy=build_policy("random", {})).why_whole_answers == loaded(windows=(8, 0)).why_whole_answers == []
    assert loaded(policy=build_policy("h2o", {})).why_whole_answers
    assert loaded(KVEvictConfig(answer_block=None), build_policy("h2o", {})).why_whole_answers == []


@pytest.mark.parametrize("bits", ["auto", 16])
def test_a_plain_model_has_the_bits_of_the_configuration(bits: Bits) -> None:
    facts = loaded(KVEvictConfig(bits=bits), build_policy("snapkv", {}))
    assert facts.bits == bits and facts.why_16_bits == [] and loaded(KVEvictConfig(bits=bits)).bits == 16


def test_sentences_of_several_things_are_apart() -> None:
    checks = (Check("GPU", "missing", "none", "add one"), Check("torch", "missing", "1.0", "update"))
    assert reasons(AFTER_LOAD, loaded(machine=checks)) == ["GPU: none (add one)", "torch: 1.0 (update)"]


def test_values_with_braces_are_shown_as_they_are() -> None:
    (reason,) = reasons(BEFORE_LOAD, before(KVEvictConfig(store="/a/{b}"), errors={"store": "denied {0}"}))
    assert reason == "store: '/a/{b}' cannot be made or written (denied {0}); allowed: a folder, or a URL"


def test_the_table_imports_neither_sglang_nor_torch() -> None:
    source = Path(support.__file__).read_text()
    assert not re.search(r"^(import|from) (torch|sglang)", source, re.MULTILINE)
