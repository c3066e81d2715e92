from __future__ import annotations

import pytest
from serving_bench.sampling import OTHER, WAITING, cost_of, count_costs

LOOP = "run_scheduler_process (scheduler.py:6368);Scheduler.event_loop_overlap (scheduler.py:2109)"
DECODE = f"{LOOP};EagerRunner._execute_decode (runner/eager_runner.py:268);LlamaForCausalLM.forward (llama.py:611)"
EXTEND = DECODE.replace("_execute_decode", "_execute_extend")
ATTENTION = "RadixAttention.forward (radix_attention.py:183);TorchAttention.run (sgl_kvevict/attention/cpu.py:87)"


@pytest.mark.parametrize(
    ("stack", "cost"),
    [
        (f"{DECODE};UnquantizedLinearMethod.apply (quantization/unquant.py:614)", "linear layers"),
        (f"{DECODE};{ATTENTION}", "attention"),
        (f"{DECODE};RMSNorm.forward_native (layernorm.py:866)", "norms, activations, rotary embedding"),
        (f"{LOOP};Scheduler.process_batch_result (scheduler.py:5092)", OTHER),
        (f"{LOOP};Compressor.compress (sgl_kvevict/compression/compressor.py:90)", "compression"),
        (f"{LOOP};SchedulerRequestReceiver.recv_requests (request_receiver.py:80)", WAITING),
        (f"{EXTEND};{ATTENTION}", None),
        ("Thread._bootstrap (threading.py:1002);WatchdogRaw._watchdog_thread (utils/watchdog.py:127)", None),
    ],
)
def test_a_sample_counts_for_the_first_cost_that_its_stack_names(stack: str, cost: str | None) -> None:
    assert cost_of(stack, "decode") == cost


def test_samples_are_counted_per_cost_of_one_phase() -> None:
    lines = [
        f"{DECODE};{ATTENTION} 120",
        f"{EXTEND};{ATTENTION} 30",
        f"{EXTEND};f (sgl.py:1);{ATTENTION} 2",
        f"{LOOP} 5",
    ]
    assert count_costs(lines, "prefill") == {"attention": 32, OTHER: 5}
