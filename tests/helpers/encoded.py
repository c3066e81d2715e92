"""What rows of 4 bits that an implementation writes have in common with those of the definition (``row_codec.py``).

Implementations add up in orders of their own, so a number on the boundary of two codes may get either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.row_codec import LEAST_STEP, MAX_CODE, MIDDLE, REACH, decode_rows, encode_rows, normalised
from kvevict_kernels.row_sizes import STEP_BYTES

LEAST_EQUAL = 0.995
"""Part of all codes that are those of the definition."""
ERROR_FACTOR, ERROR_NOISE = 1.001, 1e-6
"""Of a row's squared error, in normalised numbers, beside the definition's."""
BOUNDARY = 1e-5
"""Numbers so near to the boundary of two codes, in codes, may get either, and their row the step that fits to it."""
STEP_FACTOR = 0.01
"""By which steps may differ."""


def codes_of(encoded: Tensor) -> Tensor:
    """[n, head_dim], int64."""
    packed = encoded[:, :-STEP_BYTES].long()
    return torch.stack([packed & MAX_CODE, packed >> 4], dim=2).flatten(1)


def steps_of(encoded: Tensor) -> Tensor:
    """[n], float32."""
    return encoded[:, -STEP_BYTES:].contiguous().view(torch.bfloat16)[:, 0].float()


def squared_errors(found: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """[n]: of rows as they are read, [n, head_dim], beside what was written, in normalised numbers."""
    return ((found - numbers.float()) / scale).square().sum(1)


def read_as_near(found: Tensor, numbers: Tensor, mean: Tensor, scale: Tensor) -> bool:
    """Whether rows that are read are as near to what was written, [n, head_dim], as those of the definition."""
    wanted = decode_rows(encode_rows(numbers, mean, scale), mean, scale)
    errors = squared_errors(wanted, numbers, scale)
    for moved in (-BOUNDARY, BOUNDARY):
        errors = errors.maximum(_errors_of_moved(numbers, mean, scale, moved))
    return bool((squared_errors(found, numbers, scale) <= ERROR_FACTOR * errors + ERROR_NOISE).all())


def _errors_of_moved(numbers: Tensor, mean: Tensor, scale: Tensor, moved: float) -> Tensor:
    """The definition's squared errors, [n], where numbers lie a little beside the boundaries of their codes."""
    turned = normalised(numbers, mean, scale)
    first_step = (turned.abs().amax(1, keepdim=True) * (REACH / MIDDLE)).clamp_min(LEAST_STEP)
    units = (turned / first_step + (MIDDLE + 0.5) + moved).floor().clamp(0, MAX_CODE) - MIDDLE
    step = (turned * units).sum(1, keepdim=True) / units.square().sum(1, keepdim=True)
    return (turned - units * step.bfloat16()).square().sum(1)


def assert_as_near(got: Tensor, want: Tensor, numbers: Tensor, mean: Tensor, scale: Tensor) -> None:
    """Require encoded rows of ``numbers`` ([n, head_dim]) that are as near to them as those of the definition."""
    assert got.shape == want.shape and got.dtype == torch.uint8

    def errors(encoded: Tensor) -> Tensor:
        return squared_errors(decode_rows(encoded, mean, scale), numbers, scale)

    assert (errors(got) <= ERROR_FACTOR * errors(want) + ERROR_NOISE).all()
    assert codes_of(got).eq(codes_of(want)).double().mean() >= LEAST_EQUAL
    assert ((steps_of(got) - steps_of(want)).abs() <= STEP_FACTOR * steps_of(want)).all()
