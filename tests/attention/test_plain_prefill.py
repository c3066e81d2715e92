"""Long prefills that read no span, by FlashInfer's own wrapper: what is written, what is compiled, who takes over."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from helpers.poison import poisoned
from helpers.tolerance import FLOAT32_NOISE, assert_accurate
from helpers.torch_flashinfer import BROKEN, use_torch_kernels
from sgl_kvevict.attention.flashinfer.prefill import PlainPrefill, find_plain_prefill
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.errors import UnsupportedSetupError

NOISE = 4 * FLOAT32_NOISE


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_prefills_without_spans_see_their_windows(make_world, monkeypatch, backend):
    """FlashInfer is given the tokens that a window shows to any of the new ones, and no others: NaN is before them."""
    use_torch_kernels(monkeypatch, auto=backend)
    world = make_world(2, 4, 64, windows=(0, 30, 7, 0), num_token_slots=900)
    world.add((), 44)
    world.add((world.uneven_span(40),), 50)
    world.add((), 130)
    plain = PlainPrefill(world.geometry, world.k, world.v)
    attention = TritonAttention(world.geometry, world.k, world.v, plain_prefill=plain)
    new_lens = [40, 36, 45]
    hidden = world.req_to_token[world.rows[2], : 130 - 45 - 29].long()
    world.k[1:3, hidden] = world.v[1:3, hidden] = torch.nan
    attention.plan(world.batch(new_lens))
    for layer in range(4):
        q = world.queries(new_lens)
        out, lse = attention.run(layer, q, world.sm_scale)
        world.k[1:3, hidden] = world.v[1:3, hidden] = 0.0
        want_out, want_lse, baseline = world.expected(layer, q, new_lens)
        world.k[1:3, hidden] = world.v[1:3, hidden] = torch.nan
        assert_accurate(f"out of layer {layer}", out, want_out, baseline, noise=2.0**-7)
        assert_accurate(f"lse of layer {layer}", lse, want_lse, want_lse, noise=NOISE)


@pytest.mark.usefixtures("flashinfer_plans")
def test_a_plain_prefill_writes_sink_logits_in_place_and_apart(make_world, device):
    world = make_world(2, 4, 64, num_token_slots=900)
    for new in (44, 50, 60):
        world.add((), new)
    world.sink_logits = torch.randn(8)
    plain = PlainPrefill(world.geometry, world.k.to(device), world.v.to(device))
    q = world.queries(new_lens := [40, 36, 45])
    want_out, want_lse, baseline = world.expected(1, q, new_lens)
    batch = world.batch(new_lens)
    batch = replace(
        batch, req_pool_indices=batch.req_pool_indices.to(device), req_to_token=batch.req_to_token.to(device)
    )
    for requests, rows in ([0, 2], [*range(40), *range(76, 121)]), ([1, 2], list(range(40, 121))):
        out, lse = poisoned(*q.shape, dtype=q.dtype, device=device), poisoned(*q.shape[:2], device=device)
        plain.plan(batch, requests)
        plain.run(1, q.to(device), world.sm_scale, out, lse, world.sink_logits.to(device))
        assert_accurate("out", out[rows].cpu(), want_out[rows], baseline[rows], noise=2.0**-7)
        assert_accurate("lse", lse[rows].cpu(), want_lse[rows], want_lse[rows], noise=NOISE)
        others = [row for row in range(121) if row not in rows]
        assert out[others].isnan().all() and lse[others].isnan().all()


def test_a_capture_after_a_planned_prefill_runs_none_of_it(make_world, flashinfer_plans):
    """FlashInfer's plan of the prefill stays behind; a captured step has other rows."""
    world = make_world(2, 4, 16, num_token_slots=400)
    world.add((), 130)
    plain = PlainPrefill(world.geometry, world.k, world.v)
    attention = TritonAttention(world.geometry, world.k, world.v, plain_prefill=plain)
    attention.plan(world.batch([128]))
    assert len(flashinfer_plans) == 1
    world.k.zero_()
    attention.start_capture(4)
    ones, rows = torch.ones(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    attention.start_step(ones, rows, world.req_to_token)
    out, _ = attention.run(0, torch.zeros(4, 8, 16, dtype=torch.bfloat16), world.sm_scale)
    assert out.shape == (4, 8, 16)


@pytest.mark.parametrize("has_windows", [False, True])
def test_a_found_plain_prefill_has_compiled_every_kernel(make_world, monkeypatch, has_windows):
    plans = use_torch_kernels(monkeypatch)
    world = make_world(2, 4, 64, windows=(0, 30, 30, 7) if has_windows else ())
    assert find_plain_prefill(world.geometry, world.k, world.v, bool) is not None
    assert [plan.window_left for plan in plans] == ([-1, 6, 29] if has_windows else [-1])


@pytest.mark.parametrize(("asked", "taken"), [(None, "fa3"), ("auto", "fa3"), ("fa2", "fa2"), ("fa3", "fa3")])
def test_the_environment_chooses_flashinfers_kernels(make_world, monkeypatch, asked, taken):
    """On Hopper FlashInfer takes fa3 unless it is told otherwise."""
    use_torch_kernels(monkeypatch, auto="fa3")
    if asked is not None:
        monkeypatch.setenv("KVEVICT_FLASHINFER_PREFILL", asked)
    world = make_world(2, 4, 64)
    found = find_plain_prefill(world.geometry, world.k, world.v, bool)
    assert found is not None
    (prefills,) = found._prefills.values()
    assert prefills[-1]._wrapper._backend == taken


def test_unknown_kernels_are_refused(make_world, monkeypatch):
    monkeypatch.setenv("KVEVICT_FLASHINFER_PREFILL", "fa4")
    world = make_world(2, 4, 64)
    with pytest.raises(UnsupportedSetupError, match=r"KVEVICT_FLASHINFER_PREFILL is 'fa4'.*'auto', 'fa2', 'fa3'"):
        find_plain_prefill(world.geometry, world.k, world.v, bool)


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: type(error).__name__)
def test_our_kernel_takes_over_where_flashinfer_cannot_compile(make_world, monkeypatch, caplog, error):
    world = make_world(2, 4, 64)
    use_torch_kernels(monkeypatch)
    monkeypatch.setattr("flashinfer.prefill._gen_batch_prefill_primary_module", Mock(side_effect=error))
    asked: list[bool] = []
    assert find_plain_prefill(world.geometry, world.k, world.v, lambda here: bool(asked.append(here))) is None
    assert asked == [False]
    assert "long prefills without spans are computed by our own kernel: FlashInfer does not run here" in caplog.text
    assert type(error).__name__ in caplog.text and "sgl-kvevict check" in caplog.text


def test_one_rank_that_cannot_compile_decides_for_all(make_world, monkeypatch):
    use_torch_kernels(monkeypatch)
    world = make_world(2, 4, 64)
    arenas = world.geometry, world.k, world.v
    assert find_plain_prefill(*arenas, lambda here: False) is None
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert find_plain_prefill(*arenas, bool) is None
    unsupported = make_world(2, 4, 80)
    assert find_plain_prefill(unsupported.geometry, unsupported.k, unsupported.v, Mock()) is None
