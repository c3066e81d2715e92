"""The CPU platform: memory that a scheduler holds for compiled matrix products is bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.sglang_adapter import platform
from sgl_kvevict.sglang_adapter.plugin import KERNEL_CACHE_ENTRIES, cpu_platform

SERVE = """
import ctypes, json
from sgl_kvevict.sglang_adapter.plugin import KERNEL_CACHE_ENTRIES, cpu_platform
cpu_platform()
import torch

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
Info = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in FIELDS]})
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
weights = [torch.ones(rows, columns, dtype=torch.bfloat16) for rows, columns in ((960, 576), (576, 1536))]
in_use = []
for num_tokens in range(1, KERNEL_CACHE_ENTRIES + 1):
    for weight in weights:
        torch.nn.functional.linear(torch.ones(num_tokens, weight.shape[1], dtype=torch.bfloat16), weight)
    in_use.append(libc.mallinfo2().uordblks + libc.mallinfo2().hblkhd)
print(json.dumps(in_use))
"""


def test_forwards_of_ever_new_lengths_hold_no_more_memory_once_the_caches_are_full():
    """Bytes in use as malloc counts them; each new length cost 1.2 MB before the caches were bounded."""
    env = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    env["SGLANG_PLATFORM"] = "kvevict_cpu"
    run = subprocess.run([sys.executable, "-c", SERVE], env=env, capture_output=True, text=True, check=True)
    in_use = json.loads(run.stdout)
    full = len(in_use) // 2  # two products a length: the caches are full after half of the lengths
    assert in_use[-1] - in_use[full] < 4 * 2**20


def test_capacities_that_a_user_chose_are_kept(monkeypatch):
    monkeypatch.setenv("SGLANG_PLATFORM", "kvevict_cpu")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")  # restored in the end
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    assert cpu_platform() is not None
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(KERNEL_CACHE_ENTRIES)
    monkeypatch.setenv("SGLANG_PLATFORM", "")
    assert cpu_platform() is None


def test_speculation_on_a_cpu_is_refused_without_the_stand_ins_of_a_checkout(monkeypatch):
    cpu = platform.KVEvictCpuPlatform()
    assert cpu.get_speculative_cache_locs_fn().__module__ == "kvevict_tools.cpu_speculation"
    monkeypatch.setattr(platform, "find_spec", lambda _name: None)
    with pytest.raises(UnsupportedSetupError, match="not in the wheel; allowed: in a checkout"):
        cpu.get_speculative_cache_locs_fn()
