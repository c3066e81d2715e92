"""The machines on the two pools of a model with sliding-window layers."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import rule

from helpers import machines
from helpers.machines import varied
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


WINDOW_MACHINES = (
    Windows,
    varied("FewWindowsMachine", Windows, num_window_slots=95),  # prompts just fit
    *(varied(f"Window{each.__name__}", Windows, each) for each in (*machines.ON_OTHER_POOLS, machines.TailMachine)),
)
