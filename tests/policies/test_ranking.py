from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kvevict.policies.ranking import key_max, order_keys, top_counts, top_mask


def reference_order(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_top_mask_is_a_stable_sort_prefix(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    width = data.draw(st.integers(1, 12))
    number = st.sampled_from([-torch.inf, -2.5, -0.0, 0.0, 1e-30, 0.5, 0.5000001, 3.0])
    values = [data.draw(st.lists(number, min_size=width, max_size=width)) for _ in range(rows)]
    counts = [data.draw(st.integers(0, width)) for _ in range(rows)]
    keys = order_keys(torch.tensor(values))
    mask = top_mask(keys, torch.tensor(counts))
    for row, count, got in zip(values, counts, mask.tolist(), strict=True):
        single = [float(torch.tensor(v)) for v in row]
        assert sorted(reference_order(single)[:count]) == [i for i, hit in enumerate(got) if hit]
    assert torch.equal(top_mask(keys, counts[0])[0], mask[0])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_top_counts_is_a_stable_sort_of_the_flat_rows(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    values = data.draw(st.lists(st.integers(0, 3), min_size=rows * width, max_size=rows * width))
    total = data.draw(st.integers(0, rows * width))
    expected = [0] * rows
    for i in reference_order(values)[:total]:
        expected[i // width] += 1
    keys = order_keys(torch.tensor(values, dtype=torch.float32)).view(1, rows, width)
    assert top_counts(keys, total).tolist() == [expected]
    assert top_counts(keys, torch.tensor([total])).tolist() == [expected]


def test_tie_break_decides_between_rounding_noise_only() -> None:
    values = torch.tensor([0.5, 0.5 + 6e-8, 0.5 + 1e-5])
    keys = order_keys(values, torch.tensor([0.3, 0.2, 0.1]))
    assert keys.argsort(descending=True).tolist() == [2, 0, 1]


def test_negative_and_extreme_scores_keep_their_order() -> None:
    values = torch.tensor([-torch.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, torch.inf])
    for keys in (order_keys(values), order_keys(values, torch.zeros(9))):
        assert keys.argsort().tolist() == list(range(9))
        assert int(keys.max()) < key_max(keys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the device here")
@pytest.mark.parametrize("has_tie_break", [False, True])
def test_the_device_path_ranks_the_same(has_tie_break: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    values, tie_break = torch.randint(-2, 3, (2, 2, 3, 20), generator=generator).float()
    keys = order_keys(values, tie_break if has_tie_break else None)
    keys = keys.masked_fill(torch.rand(keys.shape, generator=generator) < 0.1, key_max(keys))
    counts, totals = torch.tensor([[0, 1, 7], [13, 19, 20]]), torch.tensor([0, 41])

    def ranked() -> list[list[object]]:
        masks = [top_mask(keys, counts), top_mask(keys, 7), top_mask(keys[0], 0), top_mask(keys[0, 0], counts[0, 2])]
        splits = [top_counts(keys, totals), top_counts(keys, 41), top_counts(keys, 0)]
        return [x.tolist() for x in masks + splits]

    on_the_cpu = ranked()
    monkeypatch.setattr("kvevict_kernels.dispatch.TRITON_DEVICES", ("cuda", "cpu"))
    assert ranked() == on_the_cpu
