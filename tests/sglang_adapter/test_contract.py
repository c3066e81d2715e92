"""What we rely on in the installed SGLang: names, signatures and defaults. An upgrade that breaks one fails here."""

from __future__ import annotations

import dataclasses
import dis
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import subprocess
import sys
from array import array
from importlib.metadata import version
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace

import pytest
from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, MatchPrefixParams, TreeLock
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentData, TreeComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.base_runner import BaseRunner
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from helpers.harness import LORA_NAMES, TINY_LLAMA
from helpers.signatures import SIGNATURES
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.events.totals import Totals
from sgl_kvevict.machine import SGLANG_RANGE, SUPPORTED_SGLANG
from sgl_kvevict.sglang_adapter import compat, tree_shims
from sgl_kvevict.sglang_adapter.attention_backend import KVEvictAttentionBackend
from sgl_kvevict.sglang_adapter.hooks import FEATURES
from sgl_kvevict.sglang_adapter.tree import UnifiedTreePort, namespace_of_request
from sgl_kvevict.support import BACKENDS, FLAGS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "design" / "sglang.md").read_text(encoding="utf-8")
ALL_HOOKS = [hook for feature in FEATURES for hook in feature.hooks]

ASSIGNED = {
    ForwardBatch: "forward_mode seq_lens seq_lens_cpu extend_seq_lens_cpu rids req_pool_indices out_cache_loc",
    MatchPrefixParams: "key req",
    EvictParams: "num_tokens",
    EvictResult: "num_tokens_evicted",
    TreeLock: "node receipt",
    CacheInitParams: "component_registry_override tree_components attn_tp_cache_group kv_event_lora_names",
    ReqKvInfo: "req_pool_idx cache_protected_len kv_allocated_len holds_kv",
    UnifiedTreeNode: "id children parent key component_data last_access_time",
    ComponentData: "value lock_ref metadata",
    UnifiedTreeCore: "root_node eviction_strategy kv_events evictable_device_leaves",
    UnifiedRadixCache: "token_to_kv_pool_allocator req_to_token_pool components tree_core disable",
    Req: (
        "full_untruncated_fill_ids extra_key cache_salt last_node lock kv skip_radix_cache_insert finished_output "
        "finished_reason logprob_start_len time_stats tokenizer arrival_processed_tokens bootstrap_host "
        "positional_embed_overrides already_computed retracted_stain beam_group cached_tokens_device "
        "cached_tokens_host cached_tokens_storage _cache_breakdown_computed priority logprob"
    ),
    Scheduler: (
        "waiting_queue max_req_input_len tokenizer model_config tree_cache _engine_paused grammar_manager "
        "flush_wrapper processed_tokens_counter chunked_req last_batch running_batch result_queue enable_overlap "
        "tp_worker"
    ),
    TpModelWorker: "model_runner",
    ModelRunner: "lora_manager",
    LoRAManager: "lora_refs",
    RadixAttention: (
        "tp_q_head_num qk_head_dim v_head_dim scaling layer_id logit_cap sliding_window_size is_cross_attention "
        "attn_type"
    ),
    ModelConfig: "attention_arch is_encoder_decoder is_hybrid_swa is_multimodal v_head_dim head_dim",
}
"""Attributes of SGLang's objects that we read."""


def assigned_names(owner: type) -> set[str]:
    """Attributes that methods of a class (or of its bases) assign, fields and properties."""
    names = {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
    for base in owner.__mro__:
        names |= {name for name, value in vars(base).items() if isinstance(value, property)}
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None:
                names |= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return names


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature(function):
    assert list(inspect.signature(function).parameters) == SIGNATURES[function].split()


@pytest.mark.parametrize("owner", ASSIGNED, ids=lambda owner: owner.__name__)
def test_attributes_exist(owner):
    assert set(ASSIGNED[owner].split()) - assigned_names(owner) == set()


def test_a_namespace_ends_with_the_id_of_its_adapter():
    for ref in (LoRARef(lora_name="a"), LoRARef(lora_id=LoRARef.deterministic_id("a", "/path"), lora_name="a")):
        req = Req("rid", "", array("q", [1]), SamplingParams(), extra_key="tenant", lora_id=ref.lora_id)
        for adapters, found in ((LORA_NAMES.from_lora_refs([ref]), ref.lora_id), (LORA_NAMES(), None)):
            assert UnifiedTreePort(None, adapters).adapter_of(namespace_of_request(req)) == found


PRIVATE = {
    "TreeComponent.is_evict_device_ongoing",
    "Scheduler._set_or_validate_priority",
    "PrefillAdder._get_running_request_total_token_offset",
    "MHATokenToKVPool._kv_buffer_shapes",
    "ServerArgs._cuda_graph_config_locked",
}
"""Private names that we use."""
OURS = (
    "attention chunk_share computed_again has_failed identity is_counted is_exact is_live is_parked is_stale "
    "least_share observation prefills tree weights"
)
"""Attributes of our own objects that somebody else than the object writes, beside the fields of ``Totals``."""


def documented(column: str) -> list[tuple[str, set[str]]]:
    """The names in the second column of a table of the page, beside what the first one says."""
    (table,) = re.findall(rf"^\|[^|]*\| {column} \|.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    cells = (line.split("|")[1:3] for line in table.splitlines()[1:])
    return [(first.strip(" `"), set(re.findall(r"`(\w+)`", names))) for first, names in cells]


def test_the_page_has_the_methods_that_we_override():
    """One that upstream renamed would silently stop being an override."""
    in_older = {"reclaimable_tokens": "reclaimable_value_len"}  # SGLang 0.5.22
    found = {}
    for ours in map(pkgutil.resolve_name, compat.OVERRIDING):
        (stock,) = ours.__bases__
        methods = {name for name, value in vars(ours).items() if inspect.isfunction(value) and name[:2] != "__"}
        found[stock.__name__] = {in_older.get(name, name) for name in methods if hasattr(stock, name)}
    assert found == dict(documented("methods"))


def adapter_modules() -> list[ModuleType]:
    folder = Path(compat.__file__).parent
    names = (path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py"))
    return [importlib.import_module(".".join([compat.__package__, *parts])) for parts in names]


def codes_of(module: ModuleType) -> list[CodeType]:
    """The code of one of our modules and of everything defined in it."""
    codes = [module.__loader__.get_code(module.__name__)]
    for code in codes:
        codes.extend(constant for constant in code.co_consts if inspect.iscode(constant))
    return codes


def used_names(module: ModuleType, *steps: str) -> set[str]:
    """Attribute names that the functions of one of our modules load or store."""
    codes = codes_of(module)
    return {step.argval for code in codes for step in dis.get_instructions(code) if step.opname in steps}


def loads_self(step: dis.Instruction) -> bool:
    """Whether a step puts ``self`` on the stack, alone or behind another variable."""
    if not step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return False
    return (step.argval[-1] if isinstance(step.argval, tuple) else step.argval) == "self"


def names_written_to_others(module: ModuleType) -> set[str]:
    """Public attributes that the functions of one of our modules write to anything but ``self``."""
    names: set[str] = set()
    for code in codes_of(module):
        steps = list(dis.get_instructions(code))
        for before, step in itertools.pairwise(steps):
            if step.opname == "STORE_ATTR" and step.argval[0] != "_" and not loads_self(before):
                names.add(step.argval)
    return names


def test_the_page_has_the_attributes_that_we_write():
    written = set().union(*(names_written_to_others(module) for module in adapter_modules()))
    listed = set().union(*(names for _, names in documented("attributes that we write")))
    written -= {*Totals.__struct_fields__, *OURS.split()}
    assert written == {name for name in listed if name[0] != "_"} - {"metadata"}  # in which we only put a mark


def test_private_names_are_those_of_the_list_and_exist():
    ours: set[str] = set()
    loaded: set[str] = set()
    for module in adapter_modules():
        loaded |= {name for name in used_names(module, "LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR") if name[0] == "_"}
        ours |= {name for name in used_names(module, "STORE_ATTR", "STORE_NAME") if name[0] == "_"}
    private = {name.split(".")[1] for name in PRIVATE if name.split(".")[1][0] == "_"}
    loaded = {name for name in loaded - ours if not name.startswith("__")}
    assert loaded == private
    owners = {UnifiedTreeCore, ComponentData, TreeComponent, Scheduler, PrefillAdder}
    owners |= {MHATokenToKVPool, MLATokenToKVPool, SchedulerWeightUpdaterManager}
    names = {f"{owner.__name__}.{name}" for owner in owners for name in assigned_names(owner) | set(dir(owner))}
    set_by_resolution = {"ServerArgs._cuda_graph_config_locked"}  # test_graphs.py resolves arguments
    assert names >= PRIVATE - set_by_resolution
    assert [name for name in PRIVATE if name.split(".")[1] not in PAGE] == []


@pytest.fixture(scope="module")
def default_args(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return ServerArgs(model_path=str(folder), device="cpu")


def test_refused_arguments_exist_and_their_default_is_allowed(default_args):
    assert [name for name, (allowed, _) in FLAGS.items() if getattr(default_args, name) not in (None, allowed)] == []


@pytest.mark.parametrize("name", [*BACKENDS, "max_total_tokens", "dp_size", "host", "port"])
def test_arguments_that_the_start_is_checked_by_exist(name, default_args):
    assert hasattr(default_args, name)


@pytest.mark.parametrize("hook", ALL_HOOKS, ids=lambda hook: hook.target.rsplit(".", 1)[-1])
def test_hook_targets_resolve(hook):
    if hook.is_step:
        assert hook.target in resolution_hooks._OVERRIDABLE_HOOKS
    else:
        assert callable(pkgutil.resolve_name(hook.target)) and hook.kind in HookType.__members__
    assert callable(hook.load())


@pytest.fixture
def newer_sglang(monkeypatch):
    """A newer version is installed, with the same functions as the newest supported one."""
    if version("sglang") != SUPPORTED_SGLANG[-1]:
        pytest.skip("an older version is installed")
    monkeypatch.setattr(compat, "version", lambda name: "0.5.99")
    yield
    monkeypatch.undo()
    compat.changes.cache_clear()
    compat.require_supported_sglang.cache_clear()


def test_the_signatures_on_file_are_those_of_the_installed_version():
    """After a change of hooks or overrides: python tools/write_signatures.py."""
    by_version = json.loads(compat.SIGNATURES.read_text())
    known = by_version[SUPPORTED_SGLANG[-1]] | by_version[version("sglang")]
    assert {name: text for name, text in known.items() if not text.startswith(compat.MISSING)} == {
        name: text for name, text in compat.signatures().items() if not text.startswith(compat.MISSING)
    }


@pytest.mark.parametrize("name", ["reclaimable_tokens", "reclaimable_value_len"])
def test_a_component_has_the_name_that_each_version_calls(name):
    """Of SGLang 0.5.22, and of 0.5.23."""
    stock = type("Stock", (), {name: lambda self: 1})
    ours, neither = ({"reclaimable_value_len": lambda self: 2}, {})
    assert getattr(tree_shims.newest_names(type("Ours", (stock,), ours))(), name)() == 2
    assert tree_shims.newest_names(type("Ours", (stock,), neither))().reclaimable_value_len() == 1


def test_actions_come_after_an_eviction_or_where_nobody_collects_them_at_once():
    now, later = [], []
    component = SimpleNamespace(apply_component_action=now.append)
    tree_shims.apply_later(component, "later", {"cache_actions": later})
    tree_shims.apply_later(component, "now", {})
    assert (now, later) == (["now"], ["later"])
    assert tree_shims.actions_of(SimpleNamespace(cache_actions=later)) is later and not tree_shims.actions_of(None)


@pytest.mark.usefixtures("newer_sglang")
def test_a_newer_version_with_the_same_functions_starts_with_one_warning(caplog):
    compat.require_supported_sglang()
    compat.require_supported_sglang()
    (record,) = caplog.records
    assert f"sglang 0.5.99 is installed, but this release supports {SGLANG_RANGE}" in record.getMessage()
    assert record.getMessage().endswith("it is not tested, and starts all the same")
    assert all(map(compat.is_on, FEATURES))


@pytest.mark.parametrize(
    ("owner", "name", "value", "says"),
    [
        (Scheduler, "get_init_info", None, "Scheduler.get_init_info: missing"),
        (Req, "init_next_round_input", lambda self, *, tree: {}, "(self, *, tree); expected (self, tree_cache=None, "),
        (
            UnifiedRadixCache,
            "touch_prefix",
            lambda self, keys: None,
            "touch_prefix: (self, keys); expected (self, key)",
        ),
        (
            resolution_hooks,
            "_OVERRIDABLE_HOOKS",
            resolution_hooks._OVERRIDABLE_HOOKS - {"handle_model_specific_adjustments"},
            "handle_model_specific_adjustments: missing",
        ),
    ],
)
@pytest.mark.usefixtures("newer_sglang")
def test_a_newer_version_is_refused_with_the_functions_that_do_not_fit(monkeypatch, owner, name, value, says):
    if value is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, value)
    with pytest.raises(UnsupportedSetupError) as error:
        compat.require_supported_sglang()
    _, *broken = error.value.reasons
    assert len(broken) == 1 and says in broken[0]


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        (lambda req, *, up_to, **rest: 0, lambda req, *, up_to, more=1: 0, True),
        (lambda req, *, up_to, **rest: 0, lambda request, *, up_to: 0, False),
        (lambda req, *, up_to, **rest: 0, lambda req, *, until: 0, False),
        (lambda req, *, up_to, **rest: 0, lambda req, up_to: 0, False),
        (lambda req, size, /, *args, **rest: 0, lambda request, length, more=1, *, name=None: 0, True),
        (lambda req, size, /, *args, **rest: 0, lambda request: 0, False),
        (lambda req, size=1: 0, lambda req, size=2: 0, True),
        (lambda req, size=1: 0, lambda req, length=2: 0, False),
        (lambda req, size=1: 0, lambda req, size, more=1: 0, False),
        (lambda req, size=1: 0, lambda req, size, **more: 0, False),
    ],
)
def test_what_a_function_of_ours_can_take(ours, theirs, fits):
    assert compat.takes(*(list(inspect.signature(each).parameters.values()) for each in (ours, theirs))) == fits


def test_stock_loader_finds_and_applies_the_plugin():
    code = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.mem_cache.registry import registered_radix_cache_backends
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.platforms import current_platform
from sgl_kvevict.sglang_adapter.plugin import register
register()
print("kvevict" in registered_radix_cache_backends(), "kvevict" in ATTENTION_BACKENDS,
      all(hasattr(create, "__wrapped__") for create in (
          MHATokenToKVPool._create_buffers_normal, MLATokenToKVPool._create_buffers)), type(current_platform).__name__)
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["True", "True", "True", "KVEvictCpuPlatform"]


def test_what_sglang_asks_the_backend_on_a_gpu_is_answered():
    """The base class raises for these; the rest belongs to what is refused."""
    question = "get_cuda_graph_seq_len_fill_value"
    for asks in (BaseRunner._dummy_run, BaseRunner._alloc_dummy_decode_buffers):
        assert question in asks.__code__.co_names
    ours, stock = object.__new__(KVEvictAttentionBackend), object.__new__(TritonAttnBackend)
    assert getattr(ours, question)() == getattr(stock, question)()
    unanswered = {
        name
        for name, method in inspect.getmembers(AttentionBackend, inspect.isfunction)
        if "NotImplementedError" in method.__code__.co_names and name not in vars(KVEvictAttentionBackend)
    }
    of_refused_graphs = {name for name in unanswered if "cpu_graph" in name or "breakable" in name}
    rest = {"forward_mixed", "update_verify_buffers_to_fill_after_draft"}  # NPU; speculative
    assert unanswered - of_refused_graphs == rest


def test_names_that_data_parallel_attention_on_a_cpu_replaces():
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor import forward_batch_info

    assert callable(dp_attention.memcpy_func) and callable(dp_attention.memcpy_cpu)
    assert isinstance(parallel_state._is_cpu, bool) and isinstance(forward_batch_info._is_cpu, bool)
