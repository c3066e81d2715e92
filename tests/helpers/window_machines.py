"""The machines on the two pools of a model with sliding-window layers."""

from __future__ import annotations

from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import rule

from helpers import machines
from helpers.two_pools import TwoPoolHarness


class Windows(machines.CacheMachine):
    """Every machine's operations, and windows that are taken away."""

    make_harness = TwoPoolHarness
    harness: TwoPoolHarness

    @rule(count=st.integers(1, 30))
    def take_windows(self, count):
        self.harness.evict_windows(count)

    def teardown(self):
        super().teardown()
        assert self.harness.allocator.swa_available_size() == self.harness._window_slots()


class WindowPoolMachine(Windows, machines.CacheMachine):
    """Two pools of the same size."""


class FewWindowsMachine(Windows, machines.CacheMachine):
    """Window slots are what is short: prompts just fit."""

    options: ClassVar[dict[str, Any]] = {"num_window_slots": 95}


class WindowPressureMachine(Windows, machines.PressureMachine):
    """Prefixes shrink under their readers."""


class WindowExactMachine(Windows, machines.ExactMachine):
    """Some requests read nothing compressed."""


class WindowTailMachine(Windows, machines.TailMachine):
    """T-LRU decides which leaf goes."""


class WindowSessionMachine(Windows, machines.SessionMachine):
    """Sessions hold windows too."""


class WindowStockMachine(Windows, machines.StockMachine):
    """Nothing is compressed."""


WINDOW_MACHINES = (
    WindowPoolMachine,
    FewWindowsMachine,
    WindowPressureMachine,
    WindowExactMachine,
    WindowTailMachine,
    WindowSessionMachine,
    WindowStockMachine,
)
