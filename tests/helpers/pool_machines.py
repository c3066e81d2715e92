"""The machines on the pools of models with recurrent layers, or with a pool of their own for sliding windows."""

from __future__ import annotations

from typing import ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import rule

from helpers import machines
from helpers.machines import varied
from helpers.states import SnapshotsHarness, StatesHarness
from helpers.two_pools import TwoPoolHarness


class States(machines.CacheMachine):
    """Every machine's operations, and states that are taken away; a prompt is found where a state is."""

    make_harness = StatesHarness
    harness: StatesHarness

    @rule(count=st.integers(1, 5))
    def take_states(self, count):
        self.harness.evict_states(count)

    def teardown(self):
        super().teardown()
        assert self.harness.rows.mamba_allocator.available_size() == self.harness.num_states


class Snapshots(States):
    """The tree gets snapshots (`extra_buffer`), which end where a grid does."""

    make_harness: ClassVar = SnapshotsHarness


STATE_MACHINES = (
    *(States, Snapshots),
    varied("FewStatesMachine", States, num_states=14),
    varied("FewSnapshotsMachine", Snapshots, num_states=28),
    *(varied(f"State{each.__name__}", States, each) for each in (*machines.ON_OTHER_POOLS, machines.TailMachine)),
    varied("StateFrequencyMachine", States, machines.FrequencyPressureMachine),  # an order that knows no states
    *(varied(f"Snapshot{each.__name__}", Snapshots, each) for each in machines.ON_OTHER_POOLS),
)


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
