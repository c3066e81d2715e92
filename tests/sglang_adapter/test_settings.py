"""Settings are read in one place, after SGLang's resolution."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from sglang.srt.runtime_context import get_context, publish
from sglang.srt.server_args import ServerArgs

from helpers.harness import TINY_LLAMA, publish_server_args
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.sglang_adapter import settings
from sgl_kvevict.sglang_adapter.plugin import register
from sgl_kvevict.sglang_adapter.settings import has_tokenizer_files, published, ranks_per_host, tokenizer_path

OURS = {"radix_cache_backend": "kvevict", "attention_backend": "kvevict"}
READERS = {"get_server_args", "resolved_view", "resolving_view", "resolution_result", "model_config_of", "config_leaf"}
BAGS = {"device", "model", "exec", "schedule", "memory", "spec", "lora", "mm", "disagg", "serving", "observability"}
RECORDS = {"server_args"}
LEFT: dict[str, str] = {}
"""Reads outside of ``settings.py``, and why each has to be there: none."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    yield tmp_path
    publish_server_args(tmp_path)


def start(folder: Path, **flags) -> None:
    """Let this process be a scheduler of a server that was started with these flags."""
    register()
    args = ServerArgs(model_path=str(folder), device="cpu", skip_tokenizer_init=True, **{**OURS, **flags})
    args.resolve_once()
    args.check_server_args()
    publish(args, role="scheduler")


def reads_in(source: str) -> set[str]:
    """Expressions that read a record of arguments, or a published bag, in a module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = (node.id,) if isinstance(node, ast.Name) else (node.attr,) if isinstance(node, ast.Attribute) else ()
        if names and (names[0] in READERS or names[0] in {f"get_{bag}" for bag in BAGS}):
            found.add(names[0])
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in RECORDS:
            found.add(ast.unparse(node))
        if isinstance(node, ast.Attribute) and node.attr in RECORDS:
            found.add(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "partial", "vars"):
            found |= {ast.unparse(node) for each in node.args if ast.unparse(each).split(".")[-1] in RECORDS}
    return found


def test_settings_are_read_in_one_place():
    own = Path(settings.__file__)
    package = own.parents[1]
    found = {}
    for path in sorted(package.rglob("*.py")):
        if path != own:
            found |= {f"{path.relative_to(package)}: {read}": "" for read in reads_in(path.read_text())}
    assert set(found) == set(LEFT)


@pytest.mark.parametrize(
    "source",
    [
        "ctx.server_args.enable_lora",
        "server_args.chunked_prefill_size",
        "def f(server_args):\n    return getattr(server_args, 'port')",
        "get_server_args().page_size",
        "from x import get_lora\nget_lora().enable_lora",
        "value_of = partial(getattr, server_args)",
        "runner = f(model_runner.server_args)",
    ],
)
def test_a_read_elsewhere_is_found(source):
    assert reads_in(source)


def test_what_sglang_decides_later_is_what_we_read(folder):
    """The record that a user typed says None, or 1, in all of these."""
    start(folder)
    assert published("chunked_prefill_size") == 4096 and ranks_per_host() == published("attn_dp_size") == 1
    assert tokenizer_path() == str(folder) and not has_tokenizer_files()
    start(folder, speculative_algorithm="ngram")
    assert published("speculative_algorithm") == "NGRAM" and published("speculative_num_draft_tokens") == 12


def test_adapters_switch_lora_on(folder):
    start(folder, lora_paths=[f"first={folder}"], max_lora_rank=4, lora_target_modules=["q_proj"])
    assert published("enable_lora") is True


def test_ranks_that_share_a_host(folder):
    start(folder, tp_size=2, dp_size=3)
    assert ranks_per_host() == 6
    start(folder, tp_size=4, nnodes=2, dist_init_addr="127.0.0.1:20000")
    assert ranks_per_host() == 2
    start(folder, tp_size=2, attn_dp_size=2)
    assert (ranks_per_host(), published("attn_dp_size")) == (2, 2)


@pytest.mark.filterwarnings("ignore")
def test_the_older_way_to_write_data_parallel_attention_is_the_same(folder):
    start(folder, tp_size=2, dp_size=2, enable_dp_attention=True)
    assert (ranks_per_host(), published("attn_dp_size")) == (2, 2)


@pytest.mark.parametrize("flags", [{"dp_size": 2, "enable_dp_attention": True}, {"attn_dp_size": 2}])
def test_both_ways_to_write_data_parallel_attention_are_checked(folder, flags):
    with pytest.raises(UnsupportedSetupError) as refused:
        start(folder, tp_size=2, speculative_algorithm="NGRAM", **flags)
    (batch,) = refused.value.reasons
    assert batch == "--attn-dp-size: with --speculative-algorithm a batch is padded with drafts of no request"


def test_a_value_that_sglang_overrides_later_is_the_one_in_effect(folder):
    start(folder)
    get_context().override("a scheduler", chunked_prefill_size=512)
    assert published("chunked_prefill_size") == 512
