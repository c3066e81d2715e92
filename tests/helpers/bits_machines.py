"""The machines with rows of 4 bits beside those of 16, and with what else shares a pool with them."""

from __future__ import annotations

from helpers import machines
from helpers.harness import CONFIG
from helpers.long_machine import LongMachine, RetainLongMachine
from helpers.verify_machines import PairsHostMachine, PairsStoreMachine, VerifyPressureMachine

SHARES = {"": 0.15, "Whole": 0.3}
"""A share at which entries are evicted at once, and one at which all have a row of 4 bits, by the machines' names."""


def with_few_bits(machine: type[machines.CacheMachine], suffix: str = "") -> type[machines.CacheMachine]:
    """A machine whose compressed rows have 4 bits, but the first tokens' 16."""
    config = machine.options.get("config", CONFIG).model_copy(update={"budget": SHARES[suffix]})
    return machines.varied(f"{machine.__name__}FewBits{suffix}", machine, bits="auto", config=config)


BITS_MACHINES = (
    *(
        with_few_bits(machine)
        for machine in (
            *(machines.CacheMachine, machines.PressureMachine, machines.ExactMachine, machines.CoarsePressureMachine),
            *(machines.SessionMachine, machines.BesideMachine, machines.BesideRetainMachine),
            *(machines.BesidePressureMachine, machines.HostMachine, machines.GrowthMachine, machines.RetainMachine),
            *(machines.HostExactMachine, LongMachine, RetainLongMachine, VerifyPressureMachine),
            *(PairsHostMachine, PairsStoreMachine),
        )
    ),
    *(with_few_bits(machine, "Whole") for machine in (machines.PressureMachine, machines.GrowthMachine, LongMachine)),
)
