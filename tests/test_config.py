from __future__ import annotations

import json
import re
import subprocess
import sys
import tracemalloc
from decimal import ROUND_CEILING, Decimal
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from sgl_kvevict.config import ENV_VAR, KVEvictConfig, load_config, read_config_file
from sgl_kvevict.errors import ConfigError


def load(text: str) -> KVEvictConfig:
    return load_config({ENV_VAR: text})


def refusal_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return str(caught.value)


@pytest.mark.parametrize("environ", [{}, {ENV_VAR: ""}, {ENV_VAR: "  "}, {ENV_VAR: "{}"}])
def test_defaults(environ):
    assert load_config(environ) == KVEvictConfig()


def test_inline_json_and_files_give_the_same(tmp_path):
    values = {"policy": "snapkv", "budget": 0.1, "tail_tokens": 8, "policy_options": {"window_size": 16}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert load(json.dumps(values)) == load(str(path)) == KVEvictConfig(**values)


@pytest.mark.parametrize("text", ["1", "1.0", "0.05", "1e-3"])
def test_a_budget_is_a_share(text):
    config = load(f'{{"budget": {text}}}')
    assert config.budget == float(text) and (config.shares == (1.0,)) is (config.budget == 1)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("budget", 0, "(0, 1]"),
        ("budget", 1.5, "(0, 1]"),
        ("budget", -0.2, "(0, 1]"),
        ("budget", float("nan"), "(0, 1]"),
        ("budget", float("inf"), "(0, 1]"),
        ("budget", True, "(0, 1]"),
        ("budget", "0.2", "(0, 1]"),
        ("budget", None, "(0, 1]"),
        ("store", "a\0b", "the path of a folder"),
        ("store", "", "the path of a folder"),
        ("score_weights", "", "the path of a file"),
        ("host_bytes", -1, "null (twice the pool), 0 (off), or an amount like 64MiB, 40GB or a number of bytes"),
        ("host_bytes", 1.5, "null (twice the pool)"),
        ("host_bytes", "1 GiBi", "null (twice the pool)"),
        ("host_bytes", True, "null (twice the pool)"),
        ("store_bytes", 0, "an amount like 64MiB, 40GB or a number of bytes, >= 1"),
        ("store_bytes", None, "an amount like 64MiB"),
        ("answer_block", 0, "an integer >= 1, or null"),
        ("answer_block", "512", "an integer >= 1, or null"),
        ("tail_tokens", 0, "an integer >= 1"),
        ("tail_tokens", 32.0, "an integer >= 1"),
        ("tail_tokens", "32", "an integer >= 1"),
        ("sink_tokens", -1, "an integer >= 0"),
        ("sink_tokens", False, "an integer >= 0"),
        ("min_prefix_tokens", 0, "an integer >= 1"),
        ("compress", "later", "'at once' or 'when short'"),
        ("policy", "", "the name of a policy"),
        ("policy", 3, "the name of a policy"),
        ("policy_options", [1], "an object of options"),
        *(("bits", value, "; allowed: 'auto' or 16") for value in (2, 4, 8, 32, "16", 16.5, True, None)),
    ],
)
def test_an_error_names_field_value_and_what_is_allowed(field, value, allowed):
    message = refusal_of(json.dumps({field: value}))
    assert f"{field}: got {json.dumps(value)}" in message and "; allowed: " in message
    assert allowed in message
    assert ENV_VAR in message


def test_all_contradictions_are_listed_at_once():
    _, *lines = refusal_of(json.dumps({"min_budget": 0.3, "store_complete": True})).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["  - min_budget", "  - store_complete"]
    assert "min_budget: got 0.3, budget is 0.2; allowed: a float in (0, budget]" in lines[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"store": None}, "store is None"),
        ({"host_bytes": 0}, "host_bytes is 0"),
        ({"budget": 1.0}, "budget is 1.0"),
    ],
)
def test_complete_files_need_what_keeps_evicted_entries(values, message):
    given = {"store": "/tmp/x", "store_complete": True}
    assert load(json.dumps(given)).store_complete
    said = refusal_of(json.dumps(given | values))
    assert "store_complete: got true" in said and message in said


def test_every_field_of_bytes_takes_what_people_write():
    names = [name for name in KVEvictConfig.model_fields if name.endswith("_bytes")]
    assert len(names) == 2
    for name in names:
        for text, amount in (("64MiB", 64 * 2**20), ("1.5 GB", 1_500_000_000), ("4096", 4096), (4096, 4096)):
            config = load(json.dumps({name: text}))
            assert getattr(config, name) == amount
            assert load(config.model_dump_json(exclude_unset=True)) == config


@pytest.mark.parametrize("budget", [0.05, 0.6, 1.0])
def test_default_shares_that_do_not_fit_the_budget_have_no_effect(budget):
    config = load(json.dumps({"budget": budget}))
    assert config.shares == {0.05: (0.05,), 0.6: (0.6, 0.325, 0.05)}.get(budget, (1.0,))
    assert config.model_copy(update={"bits": 16}).shares == {0.05: (0.05,), 0.6: (0.6, 0.1)}.get(budget, (1.0,))
    assert load(config.model_dump_json(exclude_unset=True)) == config


@pytest.mark.parametrize(("bits", "shares"), [("auto", (0.2, 0.125, 0.05)), (16, (0.2, 0.1))])
def test_prefixes_shrink_from_the_budget_to_the_least(bits, shares):
    assert KVEvictConfig(bits=bits).shares == shares
    assert KVEvictConfig(bits=bits, min_budget=0.1).shares == (0.2, 0.1)
    assert KVEvictConfig(bits=bits, min_budget=None).shares == (0.2,)


def test_all_bad_fields_are_named_at_once():
    message = refusal_of('{"budget": 2.0, "tail_tokens": 0, "sink_tokens": -1, "buget": 0.1, "policy": "snapkv"}')
    assert len(message.splitlines()) == 5
    for part in ("budget: got 2.0", "tail_tokens: got 0", "sink_tokens: got -1"):
        assert part in message
    assert "buget: unknown field (value 0.1)" in message
    assert ", ".join(KVEvictConfig.model_fields) in message


@pytest.mark.parametrize("text", ["[1]", "snapkv", "config.yaml", '"x"'])
def test_neither_json_nor_a_known_file_type(text):
    with pytest.raises(ConfigError, match=r"JSON object or the path of a \.json file"):
        load(text)


TWICE = r"config\.json is not valid JSON: .* is there twice; allowed: once"
DEEP = '{"policy_options": ' + "[" * 100_000


def test_broken_json_inline():
    assert "is not valid JSON" in refusal_of('{"budget": }')
    assert "KVEVICT_CONFIG is nested too deeply" in refusal_of(DEEP)


def test_long_values_are_not_repeated_whole():
    assert len(refusal_of(json.dumps({"policy": ["x" * 100_000]}))) < 500


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not valid JSON"),
        ("budget: 0.3\n", "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[1, 2]", "allowed: an object"),
        ("null", "allowed: an object"),
        ('{"budget": 7.5}', r"budget: got 7\.5"),
        ('{"budget": 0.2, "budget": 0.3}', TWICE),
        ('{"policy_options": {"a": 1, "a": 2}}', TWICE),
        *(pytest.param(text, "", id=text[:20]) for text in ("[" * 100_000, DEEP, f'{{"budget": {"9" * 5000}}}')),
    ],
)
def test_bad_files_name_the_file(tmp_path, content, problem):
    path = tmp_path / "config.json"
    path.write_text(content)
    said = refusal_of(str(path))
    assert re.search(problem, said) and str(path) in said and len(said) < 1000


def test_unreadable_files(tmp_path):
    missing = tmp_path / "nowhere.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        load(str(missing))
    binary = tmp_path / "config.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(str(binary))
    with pytest.raises(ConfigError, match=r"allowed: a \.json file"):
        read_config_file(tmp_path / "config.ini")


def test_a_configuration_is_frozen():
    with pytest.raises(ValidationError):
        KVEvictConfig().budget = 0.5  # type: ignore[misc]


def test_sinks_are_never_given_up():
    config = KVEvictConfig(budget=0.2, sink_tokens=4)
    assert [config.num_slots(5, start) for start in (0, 1, 3, 4)] == [4, 3, 1, 1]
    assert config.num_slots(3) == 3 and config.num_slots(3, 2, 0.1) == 2 and config.num_slots(100, share=0.5) == 50


def test_sinks_have_16_bits_beside_rows_of_4():
    config = KVEvictConfig(sink_tokens=4)
    assert [config.num_sinks(1000, start) for start in (0, 3, 4, 100)] == [4, 1, 0, 0]
    assert config.num_sinks(2) == 2 and KVEvictConfig(bits=16).num_sinks(1000) == 0


@pytest.mark.parametrize(
    ("num_slots", "start", "kept"),
    [
        (1000, 0, {16: 1000}),
        (999, 4, {16: 0, 4: 1000}),
        (250, 4, {16: 0, 4: 1000}),
        (200, 4, {16: 0, 4: 800}),
        (50, 4, {16: 0, 4: 200}),
        (204, 0, {16: 4, 4: 800}),
        (500, 0, {16: 4, 4: 996}),
        (204, 3, {16: 1, 4: 812}),
        (4, 0, {16: 4, 4: 0}),
    ],
)
def test_bits_go_before_entries_do(num_slots, start, kept):
    """Of 1,000 tokens; at a quarter of the bytes every entry is there."""
    assert KVEvictConfig(sink_tokens=4).tokens_kept(num_slots, 1000, start) == kept


def test_rows_of_16_bits_alone():
    config = KVEvictConfig(bits=16)
    assert config.tokens_kept(200, 1000) == {16: 200} and config.tokens_kept(1000, 1000) == {16: 1000}


@given(num_tokens=st.integers(1, 1200), start=st.integers(0, 9), bits=st.sampled_from(["auto", 16]), data=st.data())
def test_what_fits_is_never_more_and_hardly_less_than_the_slots_hold(num_tokens, start, bits, data):
    config = KVEvictConfig(bits=bits)
    num_slots = data.draw(st.integers(min(config.num_slots(num_tokens, start, 0.001), num_tokens), num_tokens))
    kept = config.tokens_kept(num_slots, num_tokens, start)
    used = kept[16] + -(-kept.get(4, 0) // 4)
    assert used <= num_slots and sum(kept.values()) <= num_tokens
    assert sum(kept.values()) == num_tokens or used == num_slots
    assert sum(config.tokens_kept(min(num_slots + 1, num_tokens), num_tokens, start).values()) >= sum(kept.values())


def test_shares_that_clients_choose_take_no_memory():
    config, memory = KVEvictConfig(), []
    tracemalloc.start()
    for begin in (1, 5_000):
        for i in range(begin, begin + 5_000):
            assert config.num_slots(100_000, share=i / 100_000) == max(i, config.sink_tokens)
        memory.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert memory[1] - memory[0] < 50_000  # 500,000 if each were remembered


@given(st.integers(min_value=1, max_value=100_000), st.integers(min_value=0, max_value=200_000))
@example(20_000, 2827)
@example(7_000, 100)  # in floats 0.07 * 100 is 7.000000000000001
@example(1, 1)
@example(100_000, 77)
@example(20_000, 0)
def test_a_share_is_exact_decimal_arithmetic(hundred_thousandths, num_tokens):
    budget = hundred_thousandths / 100_000
    exact = Decimal(hundred_thousandths) * num_tokens / 100_000
    assert KVEvictConfig(budget=budget, sink_tokens=0).num_slots(num_tokens) == exact.to_integral_value(ROUND_CEILING)


def test_the_tables_of_the_docs_are_current():
    command = [sys.executable, str(Path(__file__).parents[1] / "tools" / "write_tables.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
