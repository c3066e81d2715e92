"""Views of rows in which torch gathers them."""

from __future__ import annotations

import pytest
import torch

from kvevict_kernels.checks import FP8
from kvevict_kernels.stored_rows import WORD, as_words

ALL_BITS = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(-1, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8, torch.float32], ids=str)
def test_rows_are_gathered_bit_for_bit(dtype: torch.dtype) -> None:
    """Every pattern of 16 bits, payloads of NaN too; by one index for all and by one along the second dimension."""
    rows = ALL_BITS.view(dtype)
    words = as_words(rows)
    assert words.dtype == WORD
    order = torch.randperm(len(rows))
    want = ALL_BITS[order]
    assert torch.equal(torch.index_select(words, 0, order).view(dtype).view(torch.int16), want)
    both = as_words(torch.stack([rows.view(torch.int16)] * 2).view(dtype))
    assert torch.equal(both[:, order].view(dtype).view(torch.int16), torch.stack([want] * 2))


def test_rows_that_do_not_fit_are_left_as_they_are() -> None:
    """A width, a beginning or a step that is no multiple of 16 bytes; rows without columns; fp8 as bytes."""
    rows = torch.zeros(6, 32, dtype=torch.bfloat16)
    assert as_words(rows[:, :16]).dtype == WORD
    for part in (rows[:, :12], rows[:, 4:20], torch.zeros(6, 20, dtype=torch.bfloat16)[:, :16], rows[:, :0], rows.T):
        assert as_words(part).dtype == torch.bfloat16
    assert as_words(torch.zeros(3, 20).to(FP8)).dtype == torch.uint8
