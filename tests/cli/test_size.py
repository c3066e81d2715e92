"""``sgl-kvevict size``: the arithmetic of a pool."""

from __future__ import annotations

import json
import math
import re

import pytest

from helpers.command_line import run
from sgl_kvevict.cli.size import fits, longest_prompt, parse_bytes, prefix_slots, read_model_sizes, with_bits_of
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.geometry import KVGeometry

LLAMA_8B = KVGeometry(num_layers=32, num_qo_heads=8, num_kv_heads=8, head_dim=128, num_token_slots=1)


def test_bytes_of_a_slot():
    assert LLAMA_8B.slot_bytes == 2 * 32 * 8 * 128 * 2 == 131072


def test_slots_of_a_prefix_are_its_share():
    assert prefix_slots(KVEvictConfig(budget=0.2), 2032) == 407  # ceil(406.4), its last tokens among them
    assert prefix_slots(KVEvictConfig(), 822, 0.05) == 42  # ceil(41.1)
    assert prefix_slots(KVEvictConfig(budget=0.2), 256) == 52
    assert prefix_slots(KVEvictConfig(budget=0.2), 200) == 200  # too short to be compressed
    assert prefix_slots(KVEvictConfig(budget=0.2, policy="none"), 2032) == 2032


def test_the_last_prefix_is_prefilled_in_full():
    rows = {row.share: row for row in fits(KVEvictConfig(bits=16), LLAMA_8B, 2032, 10_000, 1_000, 10**9)}
    assert list(rows) == [1.0, 0.2, 0.1]
    for row in rows.values():
        in_use = (row.prefixes - 1) * row.prefix_slots
        assert in_use + 2032 <= 9_000 < in_use + row.prefix_slots + 2032
    assert (rows[0.2].prefixes, rows[1.0].prefixes) == (18, 4)
    assert rows[0.2].prefix_bytes == 407 * 131072 and rows[0.2].entries == {16: 407 * 256}
    load = 407 * (131072 + 32 * 8 * 6)  # with positions and order
    assert rows[0.2].load_bytes == load and rows[0.2].host_prefixes == 10**9 // load


@pytest.mark.parametrize("num_tokens", [1994, 2032, 4000, 12_000, 30_000])
@pytest.mark.parametrize("reserved", [0, 500])
def test_a_prefix_longer_than_the_pool_fits_once_its_chunks_are_compressed(num_tokens, reserved):
    """As many as there are beside the last one, of which all but a chunk has the share while it is prefilled."""
    config = KVEvictConfig()
    rows = {row.share: row for row in fits(config, LLAMA_8B, num_tokens, 2_000 + reserved, reserved)}
    longest = longest_prompt(config, 2_000)
    assert rows[1.0].prefixes == (num_tokens == 1994) and (rows[0.05].prefixes > 0) is (num_tokens <= longest)
    for row in rows.values():
        whole = 256 + 256  # of the last chunk, and too few to compress before it
        at_peak = whole + math.ceil(row.share * (num_tokens - whole)) + (num_tokens - whole) // 256
        fit = 0 if at_peak > 2_000 else 1 + (2_000 - at_peak) // row.prefix_slots
        assert row.prefixes == (fit if num_tokens <= longest else 0)


@pytest.mark.parametrize("num_tokens", [1994, 2000, 2032])
def test_a_prefix_longer_than_the_pool_is_refused_where_prompts_do_not_shrink_while_they_are_prefilled(num_tokens):
    for config in (KVEvictConfig(policy="none"), KVEvictConfig(budget=1.0), KVEvictConfig(min_prefix_tokens=1990)):
        assert all(row.prefixes == 0 for row in fits(config, LLAMA_8B, num_tokens, 2_000))
    assert fits(KVEvictConfig(budget=1.0), LLAMA_8B, 1993, 2_000)[0].prefixes == 1


@pytest.mark.parametrize(
    ("num_tokens", "says"),
    [
        (1993, "A prefix needs all its 1,993 slots while it is prefilled; that room is counted."),
        (1994, "A prefix of 1,994 tokens is longer than the pool: its chunks are compressed"),
        (30_000, "A prefix of 30,000 tokens is refused with status 400: it is too long for the pool."),
    ],
)
def test_the_condition_of_a_long_prefix_is_said(capsys, model, num_tokens, says):
    arguments = ("--model", model, "--prefix-tokens", str(num_tokens), "--pool-tokens", "2300")
    code, out, _ = run(capsys, "size", *arguments, "--reserve-tokens", "300")
    assert code == 0 and says in out and f"has {longest_prompt(KVEvictConfig(), 2_000):,} tokens" in out


def test_every_share_of_the_default_keeps_the_entries_that_its_bits_leave_room_for():
    rows = fits(KVEvictConfig(), LLAMA_8B, 2032, 10_000, 0, 10**9)
    assert [(row.share, row.name) for row in rows] == [
        (1.0, "uncompressed"),
        (0.2, "budget"),
        (0.125, ""),
        (0.05, "min_budget"),
    ]
    assert rows[0].kept == 1 and rows[1].kept == pytest.approx(0.795, abs=0.005)
    for row in rows[1:]:
        slots = row.prefix_slots
        assert sum(-(-count // {16: 1, 4: 4}[bits]) for bits, count in row.entries.items()) == slots * 256
        assert row.entries.keys() == {16, 4} and row.entries[16] == 4 * 256
        assert row.beside_bytes == 10 * sum(row.entries.values()) + 4 * row.entries[4]
        assert row.load_bytes == slots * 131072 + 6 * sum(row.entries.values()) + 4 * row.entries[4]


@pytest.mark.parametrize(
    ("config", "sizes", "reason"),
    [
        (KVEvictConfig(), KVGeometry(2, 2, 2, 80, 1), "head_dim is 80"),
        (KVEvictConfig(), KVGeometry(2, 1, 1, 576, 1, latent_dim=576), "latents (MLA)"),
        (KVEvictConfig(bits=16), KVGeometry(2, 2, 2, 80, 1), ""),
        (KVEvictConfig(), LLAMA_8B, ""),
    ],
)
def test_rows_of_16_bits_are_planned_where_others_cannot_be(config, sizes, reason):
    planned, why = with_bits_of(config, sizes)
    assert planned.bits == (16 if reason else config.bits) and (reason in why[0] if reason else not why)


def test_the_longest_prompt_is_longer_than_a_pool_whose_chunks_can_shrink():
    assert longest_prompt(KVEvictConfig(), 10_000) > 70_000
    assert longest_prompt(KVEvictConfig(min_budget=None), 10_000) < longest_prompt(KVEvictConfig(), 10_000)
    assert longest_prompt(KVEvictConfig(policy="none"), 10_000) == longest_prompt(KVEvictConfig(budget=1.0), 10_000)
    assert longest_prompt(KVEvictConfig(policy="none"), 10_000) == 9_993
    assert longest_prompt(KVEvictConfig(), 0) == 0


@pytest.mark.parametrize(("text", "amount"), [("40GB", 40 * 10**9), ("1.5 GiB", 3 * 2**29), ("1000", 1000)])
def test_amounts_of_memory(text, amount):
    assert parse_bytes(text) == amount


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "1TBB", "many"])
def test_bad_amounts_of_memory(text):
    with pytest.raises(ConfigError, match=r"--kv-memory: got .*; allowed: an amount like 40GB, .* >= 1"):
        parse_bytes(text)


def test_host_memory_may_be_off():
    assert parse_bytes("0", "--host-memory", least=0) == 0
    with pytest.raises(ConfigError, match=r"--host-memory: got '-1'; allowed: .* >= 0"):
        parse_bytes("-1", "--host-memory", least=0)


@pytest.fixture
def model(tmp_path):
    values = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    return str(tmp_path)


def test_sizes_come_from_the_configuration(model, tmp_path):
    assert read_model_sizes(model) == LLAMA_8B
    nested = {"text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 8, "head_dim": 5}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "dtype": "float32", **nested}))
    assert read_model_sizes(model) == KVGeometry(2, 4, 4, 5, 1)
    mixed = nested["text_config"] | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", **mixed}))
    assert read_model_sizes(model) == KVGeometry(2, 4, 4, 5, 1)
    latents = nested["text_config"] | {"num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", **latents}))
    sizes = read_model_sizes(model)
    assert (sizes, sizes.slot_bytes) == (KVGeometry(2, 1, 1, 576, 1, latent_dim=576), 2 * 576 * 2)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="lacks num_hidden_layers, num_attention_heads, hidden_size"):
        read_model_sizes(model)


def test_command(capsys, model):
    code, out, _ = run(capsys, "size", "--model", model, "--prefix-tokens", "4128", "--kv-memory", "16GiB")
    assert code == 0
    assert re.search(r"budget +0\.2 +826 +108\.3 MB +11\.8 MB +80% +4\.0 ", out) and "because" not in out
    assert "131.1 KB a token slot" in out and "131,072 token slots" in out and "826" in out
    assert "host: 34.4 GB for what the pool drops" in out
    assert "The longest prompt that is answered has 2,139,391 tokens." in out
    arguments = ("--model", model, "--prefix-tokens", "4128", "--pool-tokens", "131072", "--budget", "0.125")
    figures = json.loads(run(capsys, "size", *arguments, "--bits", "16", "--json")[1])
    assert figures["model"]["slot_bytes"] == 131072 and figures["pool_slots"] == 131072
    assert figures["bits"] == 16 and [row["share"] for row in figures["shares"]] == [1.0, 0.125, 0.1]
    assert figures["shares"][1] == {
        "share": 0.125,
        "name": "budget",
        "kept": 0.125,
        "entries": {"16": 516 * 256},
        "prefix_slots": 516,
        "prefix_bytes": 516 * 131072,
        "beside_bytes": 516 * 2560,
        "prefixes": (131072 - 4128) // 516 + 1,
        "host_prefixes": 2 * 131072 * 131072 // (516 * 132608),
        "load_bytes": 516 * 132608,
        "tokens_per_slot": pytest.approx(4128 / 516),
    }
