"""Random operations on the tree: python tools/run_machines.py [OPERATIONS] [SEED] [POOLS].

Runs the machines of one kind of model in turn, each with seeds of its own, until so many operations were done (default
100,000). POOLS is ``one``, ``windows`` (layers with a sliding window have a pool of their own), ``states`` (recurrent
layers have one), ``images``, ``latents`` (values are a part of the keys' rows), ``bits`` (rows of 4 bits), or
``host`` (those of the others whose prefixes move to the host's memory). After each operation the harness checks
contents, conservation and SGLang's own `sanity_check`. Stops at the first failure with the smallest sequence that shows
it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("SGLANG_PLATFORM", "kvevict_cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from helpers.bits_machines import BITS_MACHINES
from helpers.harness import publish_server_args
from helpers.image_machines import IMAGE_MACHINES
from helpers.long_machine import LONG_MACHINES
from helpers.machines import LATENT_MACHINES, MACHINES, SETTINGS, CacheMachine, HostMachine
from helpers.pool_machines import STATE_MACHINES, WINDOW_MACHINES
from helpers.verify_machines import VERIFY_MACHINES

KINDS = {
    "bits": BITS_MACHINES,
    "one": MACHINES + LONG_MACHINES + VERIFY_MACHINES,
    "images": IMAGE_MACHINES,
    "latents": LATENT_MACHINES,
    "windows": WINDOW_MACHINES,
    "states": STATE_MACHINES,
}
KINDS["host"] = tuple(machine for kind in KINDS.values() for machine in kind if issubclass(machine, HostMachine))


def main(wanted: str = "100_000", first_seed: str = "1", pools: str = "one") -> None:
    """Run the machines."""
    machines, seed = KINDS[pools], int(first_seed)
    settings = hypothesis.settings(SETTINGS, derandomize=False, database=None)
    begin, by_machine = time.perf_counter(), dict.fromkeys(machines, 0)
    while (done := sum(by_machine.values())) < int(wanted):
        for machine in machines:
            before = CacheMachine.num_operations
            hypothesis.seed(seed)(machine)
            run_state_machine_as_test(machine, settings=settings)
            by_machine[machine] += CacheMachine.num_operations - before
            print(f"seed {seed}, {machine.__name__}: {CacheMachine.num_operations - before:,} operations", flush=True)
        print(f"seed {seed}: {sum(by_machine.values()) - done:,} operations, no failure", flush=True)
        seed += 1
    for machine, count in by_machine.items():
        print(f"{machine.__name__:<28}{count:>10,}")
    print(f"{'all':<28}{sum(by_machine.values()):>10,} operations in {time.perf_counter() - begin:.0f} s, 0 failures")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        publish_server_args(Path(folder))
        main(*sys.argv[1:])
