"""The only place with numbers that say how far a result may be from its reference."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_BASELINE_FACTOR = 2.0
"""FlashAttention's rule: at most twice the error of a plain computation in the same dtype."""

FLOAT32_NOISE = 1e-6
"""Two honest orders of a float32 sum over at most a few hundred terms, relative to the largest result."""
INTERPRETER_BFLOAT16_NOISE = 2.0**-7
"""One unit in the last place: Triton's interpreter truncates where hardware rounds to nearest."""


def rounding_noise(dtype: torch.dtype, interpreted: bool) -> float:
    """Noise for results that are rounded to ``dtype`` inside a kernel."""
    return INTERPRETER_BFLOAT16_NOISE if interpreted and dtype == torch.bfloat16 else FLOAT32_NOISE


def assert_same_bits(name: str, got: Tensor, expected: Tensor) -> None:
    """Require the same shape, dtype and bits; NaN equals NaN of the same payload."""
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{name}: dtype {got.dtype}, expected {expected.dtype}"
    different = _bits(got) != _bits(expected.to(got.device))
    if bool(different.any()):
        where = different.nonzero()[:4].tolist()
        raise AssertionError(f"{name}: {int(different.sum())} of {got.numel()} elements differ, first at {where}")


def assert_accurate(name: str, got: Tensor, reference: Tensor, baseline: Tensor, *, noise: float) -> None:
    """Require a maximum error within twice the baseline's, plus noise.

    Args:
        name: what is compared, for the message.
        got: the result under test.
        reference: the same in higher precision, or from the slow reference, float32.
        baseline: a plain computation in the dtype of the inputs, rounded where an honest user would round.
        noise: measured difference of two honest summation orders, relative to the largest value.
    """
    assert got.shape == reference.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(reference.shape)}"
    if got.numel() == 0:
        return
    reference = reference.double().cpu()
    error = (got.double().cpu() - reference).abs()
    allowed = MAX_BASELINE_FACTOR * float((baseline.double().cpu() - reference).abs().max())
    allowed += noise * float(reference.abs().max())
    worst = float(error.max())
    ratio = float(error.pow(2).mean().sqrt() / reference.pow(2).mean().sqrt().clamp_min(1e-30))
    assert worst <= allowed, f"{name}: error {worst:.3e}, allowed {allowed:.3e}, RMS ratio {ratio:.3e}"  # NaN fails too


def _bits(x: Tensor) -> Tensor:
    if not x.dtype.is_floating_point:
        return x
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
