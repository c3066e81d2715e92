"""SGLang's own benchmark client (``sglang.bench_serving``), called from Python on rows of its own generator."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import warnings
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvevict_tools.launcher import RunningServer
from kvevict_tools.measure import idle_gauges

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.benchmark import serving
    from sglang.benchmark.datasets.generated_shared_prefix import sample_generated_shared_prefix_requests
    from sglang.benchmark.utils import get_tokenizer


@dataclass(frozen=True)
class Workload:
    """Arguments of the generator ``generated-shared-prefix``, in tokens and counts."""

    num_groups: int
    prompts_per_group: int
    prefix_tokens: int
    question_tokens: int
    output_tokens: int
    seed: int = 1

    def rows(self, model: Path) -> list[Any]:
        """All requests, group after group (shuffled by nobody)."""
        random.seed(self.seed)
        np.random.seed(self.seed)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found: list[Any] = sample_generated_shared_prefix_requests(
                num_groups=self.num_groups,
                prompts_per_group=self.prompts_per_group,
                system_prompt_len=self.prefix_tokens,
                question_len=self.question_tokens,
                output_len=self.output_tokens,
                range_ratio=1.0,
                tokenizer=get_tokenizer(str(model)),
                seed=self.seed,
                ordered=True,
                group_distribution="uniform",
                zipf_alpha=None,
            )
        return found


def run_client(url: str, model: Path, rows: Sequence[Any], max_concurrency: int) -> dict[str, float]:
    """Send requests with SGLang's client; no warm-up requests of its own.

    Returns requests and tokens per second, median and 99 % TTFT, median inter-token latency, and the hit rate: cached
    prompt tokens over prompt tokens. RuntimeError: a request failed.
    """
    serving.set_global_args(_arguments())
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        result = asyncio.run(
            serving.benchmark(
                backend="sglang",
                api_url=f"{url}/generate",
                base_url=url,
                model_id=str(model),
                tokenizer=get_tokenizer(str(model)),
                input_requests=list(rows),
                request_rate=float("inf"),
                max_concurrency=max_concurrency,
                disable_tqdm=True,
                lora_names=None,
                lora_request_distribution=None,
                lora_zipf_alpha=None,
                extra_request_body={},
                profile=False,
                warmup_requests=0,
            )
        )
    if result["completed"] != len(rows):
        raise RuntimeError(f"{result['completed']} of {len(rows)} requests completed\n{printed.getvalue()[-2000:]}")
    return {
        "requests_per_s": result["request_throughput"],
        "total_tokens_per_s": result["total_throughput"],
        "ttft_ms": result["median_ttft_ms"],
        "ttft_p99_ms": result["p99_ttft_ms"],
        "inter_token_ms": result["median_itl_ms"],
        "hit_rate_pct": result["cache_report"]["cache_hit_rate_pct"],
    }


def held_slots(server: RunningServer) -> float:
    """Token slots that the idle server's cache holds."""
    return float(idle_gauges(server).evictable)


def _arguments() -> Namespace:
    """The command line arguments that the client reads beside the parameters of its main function."""
    off = ["plot_throughput", "output_details", "disable_ignore_eos", "disable_stream", "return_logprob"]
    off += ["return_routed_experts"]
    ungiven = ["goodput", "sharegpt_output_len", "token_ids_logprob", "header"]
    ungiven += ["random_input_len", "random_output_len", "random_range_ratio"]
    return Namespace(
        backend="sglang",
        dataset_name="generated-shared-prefix",
        cache_report=True,
        warmup_requests=0,
        output_file="/dev/null",
        temperature=0.0,
        top_p=1.0,
        logprob_start_len=-1,
        top_logprobs_num=0,
        **dict.fromkeys(off, False),
        **dict.fromkeys(ungiven),
    )
