from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from helpers.command_line import run
from sgl_kvevict.cli import server_plan
from sgl_kvevict.cli.server_plan import (
    CPU_POOL_TOKENS,
    check_policy,
    flag_value,
    parse_policy_options,
    plan_serve,
    resolve_config,
)
from sgl_kvevict.config import ENV_VAR, KVEvictConfig
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies.by_name import list_policies
from sgl_kvevict.sglang_adapter import start_facts


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in (ENV_VAR, "SGLANG_PLATFORM", "HF_HUB_OFFLINE", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server_plan, "_torch_has_cuda", lambda: False)
    monkeypatch.setattr(start_facts, "bind_error", lambda _host, _port: None)  # of this machine


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


# ---- serve ----------------------------------------------------------------------------------------------


def test_serve_on_a_cpu(capsys, model_folder):
    arguments = ["--policy", "snapkv", "--policy-option", "window_size=16"]
    arguments += ["--budget", "0.1", "--tail-tokens", "16"]
    code, out, err = run(capsys, "serve", model_folder, *arguments, "--dry-run", "--", "--port", "31000")
    assert code == 0
    words = shlex.split(out)
    settings, command = words[: words.index(sys.executable)], words[words.index(sys.executable) :]
    environ = dict(setting.split("=", 1) for setting in settings)
    assert command[1:5] == ["-m", "sglang.launch_server", "--model-path", model_folder]
    assert flag_value(command, "--radix-cache-backend") == "kvevict"
    assert flag_value(command, "--attention-backend") == "kvevict"
    assert flag_value(command, "--device") == "cpu"
    assert flag_value(command, "--max-total-tokens") == str(CPU_POOL_TOKENS)
    assert command[-2:] == ["--port", "31000"]
    assert environ["SGLANG_PLATFORM"] == "kvevict_cpu"
    assert environ["HF_HUB_OFFLINE"] == "1"
    values = json.loads(environ[ENV_VAR])
    assert values["policy"] == "snapkv" and values["budget"] == 0.1 and values["tail_tokens"] == 16
    assert values["policy_options"] == {"window_size": 16}
    assert len(err.splitlines()) == 1
    for part in (model_folder, "policy snapkv", "window_size=16", "keeps 0.1 of the bytes", "cpu"):
        assert part in err


def test_serve_on_a_gpu_leaves_device_and_pool_to_sglang(model_folder, monkeypatch):
    monkeypatch.setattr(server_plan, "_torch_has_cuda", lambda: True)
    plan = plan_serve(model_folder, KVEvictConfig(), [])
    assert flag_value(plan.command, "--device") is None
    assert flag_value(plan.command, "--max-total-tokens") is None
    assert "SGLANG_PLATFORM" not in plan.environ
    assert plan.summary.endswith("| cuda")
    assert not [part for part in plan.command if "cuda-graph" in part]


def test_the_users_flags_win_over_the_defaults(model_folder, monkeypatch):
    monkeypatch.setattr(server_plan, "_torch_has_cuda", lambda: True)
    flags = ["--device=cpu", "--max-total-tokens", "4000", "--attention-backend", "kvevict"]
    plan = plan_serve(model_folder, KVEvictConfig(), flags)
    assert plan.command[-len(flags) :] == tuple(flags)
    assert plan.command.count("--max-total-tokens") == plan.command.count("--attention-backend") == 1
    assert "--device" not in plan.command
    assert plan.environ["SGLANG_PLATFORM"] == "kvevict_cpu"
    assert "pool of 4000 tokens" in plan.summary


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("SGLANG_PLUGINS", "another, more", "plugin: SGLANG_PLUGINS=another, more leaves it out (unset that variable)"),
        ("SGLANG_PLATFORM", "another", "plugin: SGLANG_PLATFORM=another leaves it out (unset that variable)"),
        ("SGLANG_CACHE_DIR", "/proc/1/x", "cache: /proc/1/x cannot be written (No such file or directory)"),
        ("TORCHINDUCTOR_CACHE_DIR", "/proc/1/x", "cache: /proc/1/x cannot be written (No such file or directory)"),
    ],
)
def test_what_would_end_sglang_with_a_traceback_or_its_usage_is_refused(
    model_folder, monkeypatch, variable, value, problem
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        plan_serve(model_folder, KVEvictConfig(), [])
    assert str(caught.value).startswith(f"invalid arguments:\n  - {problem}")


@pytest.mark.parametrize("plugins", ["kvevict", "another, kvevict", " ,"])
def test_a_choice_of_plugins_with_ours_is_left_alone(model_folder, monkeypatch, plugins):
    monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    monkeypatch.setenv("SGLANG_PLATFORM", "kvevict_cpu")
    plan_serve(model_folder, KVEvictConfig(), [])


def test_a_hub_name_may_be_looked_up():
    plan = plan_serve("organisation/model", KVEvictConfig(), [])
    assert "HF_HUB_OFFLINE" not in plan.environ
    assert flag_value(plan.command, "--model-path") == "organisation/model"
    assert flag_value(plan.command, "--served-model-name") == "organisation/model"


def test_a_model_with_a_name_is_served(model_folder, monkeypatch):
    monkeypatch.setattr(server_plan, "resolve_model", lambda model: {"demo": model_folder}.get(model, model))
    monkeypatch.setattr(server_plan, "unknown_model", lambda _model: None)
    for is_fast, dtype, stored in ((True, None, None), (False, "float32", "bfloat16")):
        monkeypatch.setattr(server_plan, "has_fast_bfloat16", lambda is_fast=is_fast: is_fast)
        plan = plan_serve("demo", KVEvictConfig(), [])
        assert flag_value(plan.command, "--model-path") == model_folder
        assert (flag_value(plan.command, "--dtype"), flag_value(plan.command, "--kv-cache-dtype")) == (dtype, stored)
        assert flag_value(plan.command, "--served-model-name") == "demo"
    own = plan_serve("demo", KVEvictConfig(), ["--served-model-name", "mine"])
    assert flag_value(own.command, "--served-model-name") == "mine" and "demo" not in own.command
    assert flag_value(plan_serve(model_folder, KVEvictConfig(), []).command, "--served-model-name") == model_folder


@pytest.mark.parametrize(
    ("flags", "stored"),
    [
        (["--dtype", "float32"], "bfloat16"),
        (["--dtype=float"], "bfloat16"),
        (["--dtype", "float32", "--kv-cache-dtype", "auto"], "auto"),
        (["--dtype", "float16"], None),
    ],
)
def test_keys_and_values_have_16_bits_under_float32(model_folder, flags, stored):
    assert flag_value(plan_serve(model_folder, KVEvictConfig(), flags).command, "--kv-cache-dtype") == stored


@pytest.mark.parametrize("groups", [["--enable-dp-attention", "--dp-size", "2"], ["--attn-dp-size=2"]])
def test_both_ways_to_write_data_parallel_attention_are_checked(model_folder, groups):
    with pytest.raises(ConfigError, match="--attn-dp-size: with --speculative-algorithm"):
        plan_serve(model_folder, KVEvictConfig(), ["--speculative-algorithm", "NGRAM", *groups])
    plan_serve(model_folder, KVEvictConfig(), ["--speculative-algorithm", "NGRAM", "--dp-size", "2"])


def test_the_server_replaces_the_process(capsys, model_folder, monkeypatch):
    started: dict[str, object] = {}

    def execve(path: str, command: tuple[str, ...], environ: dict[str, str]) -> None:
        started.update(path=path, command=command, environ=environ)

    monkeypatch.setattr(os, "execve", execve)
    code, out, _ = run(capsys, "serve", model_folder, "--", "--device", "cpu")
    assert (code, out) == (0, "")
    assert started["path"] == sys.executable
    environ = started["environ"]
    assert isinstance(environ, dict) and environ["PATH"] == os.environ["PATH"] and ENV_VAR in environ


def test_every_contradicting_flag_is_named_at_once(capsys):
    flags = ["--radix-cache-backend", "other", "--attention-backend=triton", "--disable-radix-cache"]
    flags += ["--decode-attention-backend", "flashinfer", "--model-path", "x"]
    code, out, err = run(capsys, "serve", "./no/such/model", "--", *flags)
    assert (code, out) == (2, "")
    for part in (
        "--radix-cache-backend: got 'other'; allowed: kvevict",
        "--attention-backend: got 'triton'; allowed: kvevict",
        "--decode-attention-backend: got 'flashinfer'; allowed: kvevict",
        "--disable-radix-cache",
        "--model-path: give the model as the first argument",
        "got './no/such/model', no such folder",
    ):
        assert part in err


def test_what_cannot_be_used_is_named_before_anything_is_loaded(capsys, model_folder, tmp_path):
    Path(model_folder, "config.json").unlink()
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"store": str(config), "score_weights": str(config)}))
    flags = ["--page-size", "16", "--enable-lmcache", "--pp-size=2", "--max-total-tokens", "10"]
    ours = ["--config", str(config), "--policy", "snapvk", "--events", "--dry-run"]
    code, out, err = run(capsys, "serve", model_folder, *ours, "--", *flags)
    assert (code, out) == (2, "")
    for part in (
        "  - policy: got 'snapvk'; allowed: none, distilled, ",
        f"model: got {model_folder!r}, a folder without config.json",
        "--page-size is 16, only 1 is supported",
        "--enable-lmcache is True, only False is supported",
        "--pp-size is 2, only 1 is supported",
        "--max-total-tokens: got '10'; allowed: an integer >= 256",
        f"store: {str(config)!r} cannot be made or written",
        f"score_weights: score weights {str(config)!r} cannot be read",
    ):
        assert part in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"is_encoder_decoder": True}, "the model is an encoder-decoder"),
        ({"attn_logit_softcapping": 50.0}, "the model caps its attention logits"),
    ],
)
def test_a_model_that_is_refused_is_known_by_its_configuration(capsys, model_folder, keys, reason):
    Path(model_folder, "config.json").write_text(json.dumps(keys))
    code, out, err = run(capsys, "serve", model_folder, "--dry-run")
    assert (code, out) == (2, "")
    assert (
        f"  - {reason}" in err
        and "\n  - what works: Llama, " in err
        and "stock SGLang serves this model without" in err
    )


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"text_config": 7}', '{"attn_logit_softcapping": null}'])
def test_other_configurations_are_left_to_sglang(capsys, model_folder, text):
    Path(model_folder, "config.json").write_text(text)
    assert run(capsys, "serve", model_folder, "--dry-run")[0] == 0


# ---- where the configuration comes from -------------------------------------------------------------------


def test_options_win_over_the_file_and_the_file_over_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(ENV_VAR, '{"budget": 0.5, "sink_tokens": 1, "tail_tokens": 7}')
    assert resolve_config(None, {"tail_tokens": 9}).model_dump(include={"budget", "tail_tokens"}) == {
        "budget": 0.5,
        "tail_tokens": 9,
    }
    path = tmp_path / "config.json"
    path.write_text('{"budget": 0.3, "policy": "snapkv"}')
    config = resolve_config(path, {"budget": 0.4})
    assert (config.budget, config.policy, config.sink_tokens) == (0.4, "snapkv", KVEvictConfig().sink_tokens)


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"budgets": 0.3}')
    with pytest.raises(ConfigError, match=r"config\.json and the command line:\n  - budgets: unknown field"):
        resolve_config(path, {})


def test_a_policy_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_policies.py").write_text(
        "from sgl_kvevict.policies.by_name import build_policy\n"
        "def short_window(size):\n"
        "    return build_policy('snapkv', {'window_size': size})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    given = {"policy": "my_policies:short_window", "policy_options": {"size": 8}}
    check_policy(resolve_config(None, given))
    sys.modules.pop("my_policies")


def test_parse_policy_options():
    pairs = ["size=7", "ratio=0.5", "on=true", "kind=max", "name=a=b", "empty=", "list=[1, 2]"]
    assert parse_policy_options(pairs) == {
        "size": 7,
        "ratio": 0.5,
        "on": True,
        "kind": "max",
        "name": "a=b",
        "empty": "",
        "list": [1, 2],
    }
    with pytest.raises(ConfigError) as caught:
        parse_policy_options(["size", "=3", "a=1", "a=2"])
    assert len(str(caught.value).splitlines()) == 3


def test_flag_value():
    flags = ["--a", "1", "--b=2", "--a=3", "--c"]
    assert [flag_value(flags, name) for name in ("--a", "--b", "--c", "--d")] == ["3", "2", "", None]


# ---- the other commands -----------------------------------------------------------------------------------


def test_policies_are_listed(capsys):
    code, out, _ = run(capsys, "policies")
    assert code == 0
    for policy in list_policies():
        assert policy.name in out
    assert "reuse_layers=1" in out  # options of one policy with their defaults
    assert "budget_rule" in out and "'sgl-kvevict policies NAME'" in out  # those of all, and where they are explained


def test_the_options_of_one_policy(capsys):
    code, out, _ = run(capsys, "policies", "snapkv")
    assert code == 0 and "window_size" in out


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.startswith("sgl-kvevict 0.") and "\nsglang " in out


def test_without_arguments_the_commands_are_shown(capsys):
    code, out, err = run(capsys)
    assert code == 2
    for command in ("serve", "policies", "--version"):
        assert command in out + err
