"""Plans the start of stock SGLang's server for ``sgl-kvevict serve``: the plugin's flags and environment."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sgl_kvevict.cli.model_names import resolve_model, unknown_model
from sgl_kvevict.config import ENV_VAR, KVEvictConfig, load_config, parse_config, read_config_file
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.machine import CPU_PLATFORM, check_environment, has_fast_bfloat16, read_environment
from sgl_kvevict.sglang_adapter.start_facts import before_load
from sgl_kvevict.support import BACKEND_NAME, BACKENDS, BEFORE_LOAD, MACHINE, reasons

CPU_POOL_TOKENS = 32768
"""Pool size on a CPU; by default SGLang would claim most of the machine's memory, and fill it with zeros."""

_BACKEND_FLAGS = tuple(f"--{field.replace('_', '-')}" for field in BACKENDS)


@dataclass(frozen=True)
class ServePlan:
    """A server ready to be started; ``environ`` is added to this process's environment."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    summary: str

    def as_shell(self) -> str:
        """The command and its variables as one line for a POSIX shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*settings, shlex.join(self.command)])

    def execute(self) -> None:
        """Replace this process by the server; does not return."""
        # What is still buffered would be lost with this process's memory.
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(self.command[0], self.command, {**os.environ, **self.environ})


def parse_policy_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` pairs; a value is JSON (numbers, true, false, null, lists), else plain text.

    ConfigError: lists every pair without ``=`` or key, and every key given twice.
    """
    options: dict[str, Any] = {}
    problems = []
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            problems.append(f"policy option: got {pair!r}; allowed: key=value")
        elif key in options:
            problems.append(f"policy option {key!r}: given twice; allowed: once")
        else:
            try:
                options[key] = json.loads(text)
            except json.JSONDecodeError:
                options[key] = text
    if problems:
        raise ConfigError("\n".join(problems))
    return options


def resolve_config(config_file: Path | None, given: Mapping[str, Any]) -> KVEvictConfig:
    """Combine ``config_file`` (None: ``KVEVICT_CONFIG``, or the defaults) with ``given``, fields that take precedence.

    The policy is checked by :func:`check_policy`.
    """
    if config_file is None:
        # Unset fields stay unset: whether a default was chosen decides which of two defaults applies.
        base, source = load_config().model_dump(exclude_unset=True), "the command line"
    else:
        base, source = read_config_file(config_file), f"{config_file} and the command line"
    return parse_config({**base, **given}, source)


def check_policy(config: KVEvictConfig) -> None:
    """Check the policy's name and options; ConfigError if one is wrong."""
    from sgl_kvevict.policies.by_name import build_policy

    if ":" in config.policy and "" not in sys.path:
        sys.path.insert(0, "")  # a module of the current folder: the server, started with -m, finds it too
    build_policy(config.policy, config.policy_options)


def plan_serve(model: str, config: KVEvictConfig, sglang_flags: Sequence[str]) -> ServePlan:
    """Determine the command that starts SGLang.

    ``model`` is a folder, a hub name, or a name that :func:`resolve_model` knows; the user's own ``sglang_flags`` are
    passed on unchanged. ConfigError lists every reason: SGLang is missing, the policy or a flag is wrong, or the model,
    the pool, the port, or a file, folder or socket of the configuration cannot be used.
    """
    problems = _problems(model, config, sglang_flags)
    try:
        check_policy(config)
    except ConfigError as error:
        problems += str(error).splitlines()
    if problems:
        raise ConfigError("invalid arguments:\n" + "\n".join(f"  - {problem}" for problem in problems))
    device = flag_value(sglang_flags, "--device")
    on_cpu = device == "cpu" if device else not _torch_has_cuda()
    path = resolve_model(model)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", path]
    wanted = {"--radix-cache-backend": BACKEND_NAME, "--attention-backend": BACKEND_NAME, "--served-model-name": model}
    environ = {ENV_VAR: config.model_dump_json(exclude_unset=True)}
    if on_cpu:
        wanted |= {"--device": "cpu", "--max-total-tokens": str(CPU_POOL_TOKENS)}
        if path != model and not has_fast_bfloat16():  # a named model: bfloat16
            wanted["--dtype"] = "float32"
        dtype = flag_value(sglang_flags, "--dtype") or wanted.get("--dtype")
        if dtype in ("float", "float32"):  # a budget is a share of rows of 16 bits, and the pool's rows are no wider
            wanted["--kv-cache-dtype"] = "bfloat16"
        environ["SGLANG_PLATFORM"] = CPU_PLATFORM
    # A model on this machine needs no hub, and transformers would wait for one that cannot be reached.
    if Path(path).is_dir():
        environ["HF_HUB_OFFLINE"] = "1"
    for flag, value in wanted.items():
        if flag_value(sglang_flags, flag) is None:
            command += [flag, value]
    # Last, so that the user's flags win.
    command += sglang_flags
    pool = flag_value(command, "--max-total-tokens")
    place = "cpu" if on_cpu else device or "cuda"
    dtype = flag_value(command, "--dtype")
    place += (f", {dtype}" if dtype else "") + (f", pool of {pool} tokens" if pool else "")
    return ServePlan(tuple(command), environ, f"{model} | {describe(config)} | {place}")


def describe(config: KVEvictConfig) -> str:
    """Summarize policy and sizes of a configuration."""
    options = "".join(f" {name}={value}" for name, value in config.policy_options.items())
    return (
        f"policy {config.policy}{options}, keeps {config.budget} of the bytes, tail {config.tail_tokens}, "
        f"sinks {config.sink_tokens}, compresses from {config.min_prefix_tokens} tokens on"
    )


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The value of the last ``name VALUE`` or ``name=VALUE`` in ``flags``; None if it is absent."""
    value = None
    for i, flag in enumerate(flags):
        if flag == name:
            value = flags[i + 1] if i + 1 < len(flags) else ""
        elif flag.startswith(f"{name}="):
            value = flag.partition("=")[2]
    return value


def _problems(model: str, config: KVEvictConfig, flags: Sequence[str]) -> list[str]:
    problems = []
    if importlib.util.find_spec("sglang") is None:
        problems.append("SGLang is not installed: pip install 'sgl-kvevict[gpu]', or `make setup` on a CPU")
    for check in check_environment(read_environment()):
        problems += reasons(MACHINE, check)
    folder = Path(resolve_model(model))
    if reason := unknown_model(model):
        problems.append(reason)
    elif folder.is_dir() and not (folder / "config.json").is_file():
        problems.append(f"model: got {model!r}, a folder without config.json; allowed: the folder of a model")
    if flags and not flags[0].startswith("-"):
        problems.append(f"got {flags[0]!r} after the model; allowed: -- and SGLang's own flags")
    for flag in _BACKEND_FLAGS:
        value = flag_value(flags, flag)
        if value not in (None, BACKEND_NAME):
            problems.append(f"{flag}: got {value!r}; allowed: {BACKEND_NAME} (or leave it out)")
    for flag in ("--model-path", "--model"):
        if flag_value(flags, flag) is not None:
            problems.append(f"{flag}: give the model as the first argument instead")
    port = flag_value(flags, "--port")
    # SGLang's own defaults.
    address = (flag_value(flags, "--host") or "127.0.0.1", "30000" if port is None else port)
    facts = before_load(partial(_argument, flags), config, folder=folder, address=address)
    return problems + reasons(BEFORE_LOAD, facts)


def _argument(flags: Sequence[str], field: str) -> object:
    """The value of a field of SGLang's ``ServerArgs`` in the flags: True without a value, None if absent.

    ``--enable-dp-attention --dp-size N`` is SGLang's older way to write ``--attn-dp-size N``. The plan adds the flags
    of our backends.
    """
    if field in BACKENDS:
        return BACKEND_NAME
    flag = f"--{field.replace('_', '-')}"
    if field == "attn_dp_size" and flag_value(flags, flag) is None and "--enable-dp-attention" in flags:
        flag = "--dp-size"
    value = flag_value(flags, flag)
    if value is None or field == "max_total_tokens":  # any number: shown as it was written
        return value
    if not value or (flag in flags and value.startswith("--")):
        return True
    return int(value) if value.isdecimal() else value


def _torch_has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
