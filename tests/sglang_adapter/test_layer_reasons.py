"""Variants of attention that only a model's layers know are refused before the server takes requests."""

from __future__ import annotations

import pytest
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from torch import nn

from sgl_kvevict.sglang_adapter.refusals import layer_reasons


def model(**variant: object) -> nn.Module:
    """Two plain layers and a third one."""
    layers = [RadixAttention(4, 16, 0.25, 2, layer_id=i) for i in range(3)]
    for name, value in variant.items():
        setattr(layers[2], name, value)
    return nn.Sequential(*layers)


def test_plain_layers_are_fine() -> None:
    assert layer_reasons(model()) == []


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ({"logit_cap": 30.0}, "a layer caps its attention logits"),
        ({"is_cross_attention": True}, "a layer's attention is not causal self-attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "a layer's attention is not causal self-attention"),
        ({"sliding_window_size": 128}, "a layer's attention has a sliding window"),
    ],
)
def test_a_variant_in_one_layer_is_named(variant: dict[str, object], reason: str) -> None:
    assert layer_reasons(model(**variant)) == [reason]
