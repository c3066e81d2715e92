"""Attention through FlashInfer's own wrapper, whose compiled module is replaced by torch on a CPU."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from importlib.metadata import requires, version

import flashinfer
import pytest
import torch

from helpers.implementations import add_all_kinds
from helpers.torch_flashinfer import BROKEN
from sgl_kvevict.attention.backend import build_attention
from sgl_kvevict.attention.flashinfer.attention import FlashInferAttention
from sgl_kvevict.attention.flashinfer.lists import build_span_lists
from sgl_kvevict.attention.flashinfer.wrapper import ROW_BOUNDS
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.errors import UnsupportedSetupError

pytestmark = pytest.mark.usefixtures("flashinfer_plans", "flashinfer_is_chosen")

ROUNDINGS = 2.0**-8
"""Spans and suffix are rounded to bfloat16 before they are merged, half a unit in the last place each."""


def make(world) -> FlashInferAttention:
    return FlashInferAttention(world.geometry, world.k, world.v)


def test_long_runs_are_cut_into_parts(make_world, monkeypatch):
    monkeypatch.setattr("sgl_kvevict.attention.flashinfer.lists.PART_ENTRIES", 8)
    world = make_world(2, 4, 64)
    add_all_kinds(world)
    attention = make(world)
    world.check(attention, noise=ROUNDINGS)
    assert attention._spans is not None
    lists, _ = attention._spans
    assert lists.pages.qo_indptr.numel() - 1 > 2 * len(world.paths) * world.geometry.num_kv_heads
    # Parts tile the list of head slots: every entry of every layer belongs to exactly one row.
    assert int(lists.kv_indptr[0, 0]) == 0
    assert torch.equal(lists.kv_indptr[1:, 0], lists.kv_indptr[:-1, -1])
    assert int(lists.kv_indptr[-1, -1]) == lists.pages.kv_indices.numel()
    assert bool((lists.kv_indptr.diff(dim=1) >= 0).all())


def test_shared_spans_are_listed_once(make_world):
    world = make_world(2, 4, 64)
    span = world.uneven_span(90)
    for _ in range(8):
        world.add((span,), 3)
    batch = world.batch()
    lists = build_span_lists(batch.paths, batch.new_lens, world.geometry, torch.device("cpu"))
    assert lists.pages.qo_indptr.tolist() == [0, 8, 16]
    assert lists.pages.kv_indices.numel() == int(span.lens.sum())


def test_spans_are_planned_once_per_batch(make_world, flashinfer_plans):
    """Steps plan the suffixes only; wrappers of batches that do not come again are used again."""
    world = make_world(2, 4, 64)
    shared = world.uneven_span(40)
    world.add((shared,), 9)
    world.add((shared, world.uneven_span(20)), 3)
    attention = make(world)
    for _ in range(4):
        world.check(attention, noise=ROUNDINGS)
        world.grow(0, 1)
        world.grow(1, 1)
    assert sum(plan.disable_split_kv for plan in flashinfer_plans) == 1
    for _ in range(3):
        world.add((shared,), 5)
        world.check(attention, noise=ROUNDINGS)
    assert sum(plan.disable_split_kv for plan in flashinfer_plans) == 4
    assert sum(plan.causal for plan in flashinfer_plans) == 7


def test_nothing_compressed(make_world):
    world = make_world(2, 4, 64)
    world.add((), 40)
    world.add((), 1)
    attention = make(world)
    world.check(attention, noise=ROUNDINGS)
    assert attention._spans is None


@pytest.mark.usefixtures("interpreted", "small_chunks")
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("extend_lens", [None, [2, 40, 45, 1]], ids=["decode", "extend"])
def test_layers_with_windows_are_our_kernels(make_world, extend_lens, has_sinks):
    """The others stay FlashInfer's; a model of windows alone has none of it."""
    world = make_world(2, 4, 64, windows=(0, 1, 40, 1000), num_token_slots=900)
    first = world.uneven_span(30)
    world.add((first,), 12)
    world.add((first, world.uneven_span(20, start=first.num_tokens)), 50)
    world.add((), 60)
    world.add((world.uneven_span(60),), 3)
    world.sink_logits = torch.randn(8) if has_sinks else None
    attention = build_attention("flashinfer", world.geometry, world.k, world.v)
    assert not hasattr(attention, "start_capture")
    world.check(attention, extend_lens, noise=ROUNDINGS)
    windows_alone = replace(world.geometry, windows=(7,) * 4)
    assert isinstance(build_attention("flashinfer", windows_alone, world.k, world.v), TritonAttention)


def test_the_installed_flashinfer_has_what_we_rely_on():
    """Names, order and meaning that this package took from FlashInfer 0.7.2, which SGLang 0.5.23 pins."""
    assert version("flashinfer-python") == "0.7.2"
    assert "flashinfer_python[cu13]==0.7.2" in (requires("sglang") or [])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    made = inspect.signature(wrapper.__init__).parameters
    assert list(made)[1:3] == ["float_workspace_buffer", "kv_layout"] and "backend" in made
    plan = inspect.signature(wrapper.plan).parameters
    assert list(plan)[1:9] == [
        *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
        *("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size"),
    ]
    assert {"sm_scale", "q_data_type", "kv_data_type", "causal", "window_left", "disable_split_kv"} <= set(plan)
    run = inspect.signature(wrapper.run).parameters
    assert list(run)[1:3] == ["q", "paged_kv_cache"]
    assert {"k_scale", "out", "lse", "return_lse", "lse_base", "enable_pdl"} <= set(run)
    assert ROW_BOUNDS in inspect.unwrap(wrapper.run).__code__.co_names  # read when it runs, not when it plans


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: type(error).__name__)
def test_a_flashinfer_that_cannot_compile_is_refused_with_the_mend(make_world, monkeypatch, error):
    world = make_world(2, 4, 64)

    def build(*args: object) -> None:
        raise error

    monkeypatch.setattr("flashinfer.prefill._gen_batch_prefill_primary_module", build)
    with pytest.raises(UnsupportedSetupError, match=f"{type(error).__name__}: .*sgl-kvevict check") as refused:
        build_attention("flashinfer", world.geometry, world.k, world.v)
    assert "nvcc" in str(refused.value) and "ninja" in str(refused.value)


def test_a_flashinfer_that_cannot_be_imported_is_refused(make_world, monkeypatch):
    world = make_world(2, 4, 64)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(UnsupportedSetupError, match="FlashInfer does not run here: ModuleNotFoundError"):
        make(world)


def test_a_warm_up_plans_spans_and_suffixes(make_world, flashinfer_plans):
    world = make_world(2, 4, 64)
    attention = make(world)
    attention.warm_up()
    assert [plan.causal for plan in flashinfer_plans] == [False, True]
    add_all_kinds(world)
    world.check(attention, noise=ROUNDINGS)
