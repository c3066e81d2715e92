"""What a prompt, and each thing that happens to its prefix later, passes through: files, functions, crossings, calls.

Run: make flows, or python tools/trace_flows.py [OUT], which is docs/results/flows.json by default

Each flow runs once, traced, through the tests' scheduler in miniature (`tests/helpers/harness.py`): SGLang's real tree,
pools and requests, our real policies and kernels, no model. The harness counts as SGLang, for whose scheduler it
stands. Attention is no part of a flow, and what is compiled is one call. What is ours is told by where a file lies, so
no module is named here. All figures are counts: they are the same on every machine.

Of each flow are counted: our files that are entered; our functions; calls from our code to SGLang's and from SGLang's
to ours; and all calls of functions, Python and C, that either makes. A resize is counted in functions of the plugin on
the way from the outermost one, which decides, to those that move entries or release token slots.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ.setdefault("SGLANG_PLATFORM", "kvevict_cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import sglang
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from helpers.harness import NO_ROTARY, Harness, publish_server_args
from helpers.learned import random_scores
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies import build_policy

NOW = ROOT / "docs" / "results" / "flows.json"
PLUGIN = ROOT / "sgl_kvevict"
OURS = (PLUGIN, ROOT / "kernels")
SGLANG = Path(sglang.__file__).parent
DRIVERS = (ROOT / "tests", ROOT / "tools")
"""What stands for SGLang's scheduler; its own calls are not counted."""
ALLOCATORS = SGLANG / "srt" / "mem_cache" / "allocator"
"""Whose ``free`` releases token slots."""

SHOT, LEARNED = "ada-snapkv", "distilled"
"""A policy that looks at the prompt's last queries, and the default."""
DOCUMENT = [token * 7 % 50 for token in range(300)]


def lies_in(code: CodeType, folders: Iterable[Path]) -> bool:
    return any(Path(code.co_filename).is_relative_to(folder) for folder in folders)


@cache
def is_ours(code: CodeType) -> bool | None:
    """Whether code is ours, or SGLang's; None: a library's."""
    if lies_in(code, OURS):
        return True
    return False if lies_in(code, (SGLANG, *DRIVERS)) else None


@cache
def is_driver(code: CodeType) -> bool:
    return lies_in(code, DRIVERS)


@cache
def releases(code: CodeType) -> bool:
    return code.co_name == "free" and lies_in(code, (ALLOCATORS,))


def stack_of(frame: FrameType | None) -> Iterator[CodeType]:
    """Code of the frames of ours and of SGLang, innermost first; those of libraries are left out."""
    while frame is not None:
        if is_ours(frame.f_code) is not None:
            yield frame.f_code
        frame = frame.f_back


def name_of(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}"


@dataclass
class Flow:
    """What was passed through until now; :meth:`note` is a profile function.

    Attributes:
        entries: a tensor that every move of entries writes to.
        functions: names of our functions, with their files.
        resizing: those on the way to where entries are moved or slots released, without kernels.
    """

    entries: torch.Tensor
    functions: set[str] = field(default_factory=set)
    resizing: set[str] = field(default_factory=set)
    crossings: int = 0
    calls: int = 0
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.entries._version

    @property
    def files(self) -> list[str]:
        return sorted({name.partition(":")[0] for name in self.functions})

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        """Count what Python reports: the call of a Python function, or of one in C by ``frame``."""
        code = frame.f_code
        if event == "call":
            self._note_call(code, next(stack_of(frame.f_back), None))
        elif event == "c_call":
            self.calls += not is_driver(next(stack_of(frame)))
        is_release = event == "call" and releases(code)
        if is_release or self.entries._version != self.version:
            self.version = self.entries._version
            self._note_resize(stack_of(frame))

    def _note_call(self, code: CodeType, caller: CodeType | None) -> None:
        assert caller is not None
        self.calls += not is_driver(caller)
        if is_ours(code) and not code.co_name.startswith("<"):  # no lambdas and comprehensions
            self.functions.add(name_of(code))
        self.crossings += is_ours(code) is not None and is_ours(code) != is_ours(caller)

    def _note_resize(self, stack: Iterator[CodeType]) -> None:
        """Add our functions up to the one that SGLang called; below them SGLang's own may release."""
        code = next((code for code in stack if is_ours(code)), None)
        while code is not None and is_ours(code):
            if lies_in(code, (PLUGIN,)) and not code.co_name.startswith("<"):
                self.resizing.add(name_of(code))
            code = next(stack, None)


class Driver(Harness):
    """The harness without its checks of contents and conservation."""

    def check(self) -> None:
        pass

    def _forward(self, *_: object) -> None:
        pass

    def evict(self, num_slots: int) -> int:
        return int(self.tree.evict(EvictParams(num_tokens=num_slots)).num_tokens_evicted)


class Tracer:
    """Runs all flows once."""

    def __init__(self) -> None:
        self.flows: dict[str, Flow] = {}

    @contextmanager
    def flow(self, name: str, driver: Driver) -> Iterator[None]:
        flow = self.flows[name] = Flow(driver.k)
        gc.collect()
        gc.disable()  # finalisers would count
        sys.setprofile(flow.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()

    def run(self) -> None:
        self._of_a_prompt()
        self._of_slots_that_are_short()
        self._of_the_host()

    def _of_a_prompt(self) -> None:
        driver = make(SHOT)
        with self.flow("a new prompt, by its last queries", driver):
            assert driver.run(DOCUMENT) is not None
        assert driver.tree.spans
        num_nodes = len(list(driver.tree.nodes()))
        req = driver.request([*DOCUMENT[:100], 60, 61])
        with self.flow("a split: a prompt diverges", driver):
            assert driver.admit(req)
        assert len(list(driver.tree.nodes())) == num_nodes + 1
        driver = make(LEARNED)
        with self.flow("a new prompt, by learned scores", driver):
            assert driver.run(DOCUMENT) is not None

    def _of_slots_that_are_short(self) -> None:
        driver = make(LEARNED, waits=True)
        driver.finish(driver.run(DOCUMENT))
        for name in ("the first shrink", "the second shrink"):
            before = driver.tree.held_slots()
            with self.flow(name, driver):
                assert driver.evict(1)
            assert 0 < driver.tree.held_slots() < before

    def _of_the_host(self) -> None:
        driver = make(SHOT, host_blocks=600)
        driver.finish(driver.run(DOCUMENT))
        with self.flow("a drop to the host", driver):
            driver.evict(driver.tree.held_slots())
        assert not list(driver.tree.nodes())
        req = driver.request(DOCUMENT)
        with self.flow("a return from the host", driver):
            assert driver.admit(req)
        assert req.prefix_len


def make(policy: str, **options: Any) -> Driver:
    """A driver with a policy of ours; its learned scores, if it has some, are known."""
    config = KVEvictConfig(policy=policy, tail_tokens=8, min_prefix_tokens=32)
    driver = Driver(num_slots=2000, max_tokens=1000, config=config, policy=build_policy(policy, {}), **options)
    if policy == LEARNED:
        compressor = driver.tree.compressor
        compressor.learned = random_scores(driver.geometry, NO_ROTARY)
    return driver


def trace() -> dict[str, dict[str, Any]]:
    """Counts and names of all flows. They run twice: the first time modules are imported and caches filled."""
    for _ in range(2):
        tracer = Tracer()
        tracer.run()
    return {
        name: {
            "files": len(flow.files),
            "functions": len(flow.functions),
            "crossings": flow.crossings,
            "calls": flow.calls,
            "names of files": flow.files,
            "resized by": sorted(flow.resizing),
        }
        for name, flow in tracer.flows.items()
    }


def main(out: Path = NOW) -> None:
    """Trace all flows, print their counts and write them."""
    with tempfile.TemporaryDirectory() as folder:
        publish_server_args(Path(folder))
    flows = trace()
    for name, counts in flows.items():
        print(f"{name:34}" + "".join(f"{counts[key]:7,} {key}" for key in ("files", "functions", "crossings", "calls")))
        print(*(f"    {each}" for each in counts["resized by"]), sep="\n")
    out.write_text(json.dumps({"flows": flows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
