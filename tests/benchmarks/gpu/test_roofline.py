"""Bytes and operations of timed lines, counted one by one for small shapes; shares of rows; the committed page."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_bench import roofline
from gpu_bench.setting import FULL, SMOKE, Setting

TINY = Setting("cpu", 3, 2, 2, 3, 16, 20, 0.25, (2,), (2,), 4, 1)
KEPT = 5
BFLOAT16 = 2


def counted(new_lens: list[int], spans: list[int], suffixes: list[int]) -> roofline.Work:
    """One layer by the loops of plain attention; request i reads span ``spans[i]`` (-1: none) and its own tokens."""
    heads, width = TINY.num_kv_heads, TINY.head_dim
    rows: set[tuple[str, int, int, int]] = set()  # entries that are read
    num_bytes, flops = 0, 0
    for request, (new, span, suffix) in enumerate(zip(new_lens, spans, suffixes, strict=True)):
        for head in range(heads):
            keys = [("span", span, head, i) for i in range(KEPT if span >= 0 else 0)]
            own = [("own", request, head, i) for i in range(suffix)]
            rows.update(keys + own)
            for token in range(new):
                visible = len(keys) + sum(i <= suffix - new + token for i in range(suffix))
                for _ in range(TINY.group_size):
                    flops += visible * width * 2  # scores: a product and a sum each
                    flops += visible * width * 2  # values
                    num_bytes += width * BFLOAT16  # query
                    num_bytes += width * BFLOAT16 + 4  # result and log-sum-exp
    num_bytes += len(rows) * (width * BFLOAT16 + width * BFLOAT16 + 4)  # K, V, index
    return roofline.Work(num_bytes, flops)


def test_attention_does_what_its_loops_count() -> None:
    assert TINY.kept_tokens == KEPT
    assert roofline.decode(TINY, 3, 3, 4) == counted([1] * 3, [0, 1, 2], [4] * 3)
    assert roofline.decode(TINY, 3, 1, 4) == counted([1] * 3, [0] * 3, [4] * 3)
    assert roofline.extend(TINY, 6) == counted([6], [0], [6])
    assert roofline.extend(replace(TINY, prefix_tokens=0), 6) == counted([6], [-1], [6])


def test_a_step_on_latents_does_what_its_loops_count() -> None:
    num_bytes = flops = 0
    for _request in range(3):
        num_bytes += 10 * (1152 + 4)  # a row is key and value; index
        for _head in range(16):
            num_bytes += 1152 + 1024 + 4  # query, result, log-sum-exp
            flops += 10 * 2 * (576 + 512)
    assert roofline.latent_decode(16, 3, 10) == roofline.Work(num_bytes, flops)


def test_a_compression_does_what_its_loops_count() -> None:
    key_bytes = score_bytes = moved = flops = query_bytes = 0
    for _layer in range(TINY.num_layers):
        for _head in range(TINY.num_kv_heads):
            for _token in range(TINY.prefix_tokens):
                key_bytes += TINY.head_dim * BFLOAT16
                score_bytes += 4 + 4  # pooled, plain
                flops += 32 * TINY.group_size * TINY.head_dim * 2
            for _query in range(32 * TINY.group_size):
                query_bytes += TINY.head_dim * BFLOAT16 + 4
            for _kept in range(KEPT):
                moved += 2 * (2 * TINY.head_dim * BFLOAT16)  # K and V, read and written
                moved += 4 + 4  # from, to
    positions = TINY.num_layers * TINY.num_kv_heads * KEPT * 4
    assert roofline.moves(TINY) == roofline.Work(moved)
    want = roofline.Work(key_bytes + query_bytes + 2 * score_bytes + positions + moved, flops)
    assert roofline.compression(TINY, "ada-snapkv") == want
    assert roofline.compression(TINY, "reconstruction") == roofline.Work(score_bytes / 2 + positions + moved)


def test_bytes_are_those_of_the_batch_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a batch are uneven, so their average is the formula's, but for rounding."""
    from gpu_bench.batches import Requests

    if not torch.cuda.is_available():
        monkeypatch.setattr("kvevict_kernels.dispatch.TRITON_DEVICES", ("cuda", "cpu"))
    requests = Requests(SMOKE, 2, is_shared=False, is_scattered=False, suffix_tokens=SMOKE.suffix_tokens)
    rows = requests.q.shape[0] * requests.q.shape[1]
    want = requests.bytes_per_layer() + rows * (2 * 2 * SMOKE.head_dim + 4)
    assert roofline.decode(SMOKE, 2, 2, SMOKE.suffix_tokens).num_bytes == pytest.approx(want, rel=0.05)


def test_the_slower_of_memory_and_tensor_cores_bounds_a_line() -> None:
    peaks = roofline.Peaks(bytes_per_second=100.0, flops=1000.0)
    assert roofline.Work(200.0, 500.0).least_seconds(peaks) == 2.0
    assert roofline.Work(200.0, 500.0).bound(peaks) == "memory"
    assert roofline.Work(200.0, 5000.0).least_seconds(peaks) == 5.0
    assert roofline.Work(200.0, 5000.0).bound(peaks) == "tensor cores"


def test_unknown_devices_and_host_times_get_no_share() -> None:
    assert roofline.peaks_of("NVIDIA L40") is None
    rows = [{"requests": 1, "us per layer": 10.0}]
    assert roofline.with_shares("bandwidth", rows, FULL, "CPU (smoke run)") == rows


def test_a_line_says_how_much_of_what_is_possible_it_reaches() -> None:
    seconds = roofline.decode(FULL, 8, 8, 128).least_seconds(roofline.PEAKS["H100"])
    row = {"requests": 8, "token slots": "scattered", "MB per layer": 1.0, "us per layer": 4e6 * seconds}
    (shown,) = roofline.with_shares("bandwidth", [row], FULL, "NVIDIA H100 80GB HBM3")
    assert shown[roofline.SHARE] == "25 %"
    assert roofline.spoken("bandwidth", [shown]) == [
        "bandwidth, requests 8, token slots scattered: 25 % of what is possible (memory)"
    ]


def test_rows_of_a_run_have_a_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sections time are the lines of the page, and each gets its share."""
    from gpu_bench import decode, insertion, shapes

    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the device here: the benchmark itself shows it")
    monkeypatch.setattr("kvevict_kernels.dispatch.TRITON_DEVICES", ("cuda", "cpu"))
    tiny = replace(SMOKE, batches=(1,), sharers=(2,), prefix_tokens=64)
    monkeypatch.setattr(shapes, "shape_sizes", lambda setting: [(16, 2, 1)])
    monkeypatch.setattr(roofline, "shape_sizes", shapes.shape_sizes)
    sections = {"bandwidth": decode.bandwidth, "sharers": decode.sharers, "planning": decode.planning}
    sections |= {"shapes": shapes.shapes, "compaction": insertion.compaction, "compression": insertion.compression}
    for section, measure in sections.items():
        rows = measure(tiny)
        lines = roofline.TIMED[section].lines(tiny)
        assert [line for line in lines if not any(line.items() <= row.items() for row in rows)] == [], section
        shown = roofline.with_shares(section, rows, tiny, "NVIDIA L4")
        assert all(row[roofline.SHARE].endswith(" %") for row in shown), section
        assert len(roofline.spoken(section, shown)) == len(rows), section


def test_shares_of_the_tensor_peak() -> None:
    """128 x 64 x 128: 1,024 cycles of the products; two warps per scheduler, so one waits for half of them."""
    loop = roofline.ProductLoop(90, 128, rows=128, warps=8, programs=1, instructions=417, cycles=949)
    assert (loop.issue_slots, loop.tensor_cycles) == (834, 1024)
    alone, beside = 949 + 1024, 949 + 512
    assert loop.shares() == pytest.approx((1024 / alone, 1024 / beside, 2 * 1024 / (alone + beside)))
    busy = replace(loop, instructions=1000)
    assert busy.shares()[1] == pytest.approx(1024 / 2000)


def test_the_committed_page_is_current() -> None:
    import importlib.util
    from pathlib import Path

    root = Path(__file__).resolve().parents[3]
    spec = importlib.util.spec_from_file_location("write_roofline", root / "benchmarks" / "gpu" / "roofline.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    committed = (root / "docs" / "results" / "gpu" / "roofline.md").read_text()
    assert committed == module.page(), "write it with python benchmarks/gpu/roofline.py"
    assert "| 90 | 128 | 128 |" in committed
