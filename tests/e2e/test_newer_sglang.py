"""A newer SGLang with an argument more, a renamed one, and without an optional function."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import sglang

from helpers.e2e_env import ENV
from kvevict_tools.launcher import KVEVICT_CPU_FLAGS, config_env, launch

TINY = ("--skip-tokenizer-init", "--max-total-tokens", "2000", "--context-length", "1024", "--skip-server-warmup")
TARGET = "        target: EvictLayer = EvictLayer.DEVICE,\n"
CHANGES = {
    "mem_cache/unified_cache/components/full.py": (TARGET, f"{TARGET}        reason: str = '',\n"),
    "managers/scheduler.py": ("stop_at_pause", "until_pause"),
    "managers/scheduler_components/internal_state.py": ("_add_env_vars", "_add_environment"),
}


def newer_sglang(folder: Path) -> None:
    """The installed SGLang, with changes, under a newer number."""
    source = Path(sglang.__file__).parent
    shutil.copytree(source, folder / "sglang", copy_function=os.symlink)
    for name, (old, new) in CHANGES.items():
        text = (source / "srt" / name).read_text()
        assert old in text
        (folder / "sglang/srt" / name).unlink()
        (folder / "sglang/srt" / name).write_text(text.replace(old, new))
    (folder / "sglang-0.5.99.dist-info").mkdir()
    (folder / "sglang-0.5.99.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")


def test_it_starts_warns_once_and_answers_alike(tiny_llama, start, tmp_path):
    newer_sglang(tmp_path)
    env = {**ENV, **config_env({}), "PYTHONPATH": str(tmp_path)}
    newer = launch(str(tiny_llama), flags=[*KVEVICT_CPU_FLAGS, *TINY], env=env, log_path=tmp_path / "log")
    try:
        body = {"input_ids": [i * 7 % 500 + 3 for i in range(600)], "sampling_params": {"temperature": 0}}
        servers = [start(tiny_llama, *TINY, config={}), newer]
        first, second = ([json.loads(each.post("/generate", body))["output_ids"] for each in servers] for _ in range(2))
        assert first[0] == first[1] and second[0] == second[1]
        assert "kvevict" not in newer.get_json("/server_info")["internal_states"][0]
        assert newer.log().count("sglang 0.5.99 is installed") == 1
        assert "the cache in GET /server_info is off" in newer.log()
        assert newer.log().count("called in another way: ") == 2  # once each
    finally:
        newer.stop(grace_s=0)
