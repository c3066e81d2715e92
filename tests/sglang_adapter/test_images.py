"""Prompts with images: hashes as tokens, positions of three axes, and what is refused."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding, base
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE
from sglang.srt.models.gemma3_mm import Gemma3ForConditionalGeneration
from sglang.srt.models.gemma4_mm import Gemma4ForConditionalGeneration
from torch import nn

from helpers.harness import Harness
from helpers.image_machines import FIRST_IMAGE_TOKEN
from helpers.scheduling import MiniScheduler
from helpers.settings import refused
from sgl_kvevict.sglang_adapter.attention_backend import KVEvictAttentionBackend
from sgl_kvevict.sglang_adapter.model_parts import find_rotary
from sgl_kvevict.sglang_adapter.request_check import refusal

TEXT = [i * 7 % 11 for i in range(40)]
IMAGE = [FIRST_IMAGE_TOKEN + (1 << 62) - 1 - i % 4 for i in range(12)]
OTHER = [token - 100 for token in IMAGE]


def ends(harness: Harness) -> list[int]:
    return sorted(span.end for span in harness.tree.spans.values())


# ---- the life of a prefix -------------------------------------------------------------------------------------------


def test_hashes_begin_where_sglang_lets_them_begin():
    assert FIRST_IMAGE_TOKEN == MM_PAD_SHIFT_VALUE


def test_prompts_with_images_are_compressed_like_others():
    harness = Harness(num_slots=600)
    for image in (IMAGE, OTHER, IMAGE):  # the second one cuts the path inside what is compressed
        harness.finish(harness.run(TEXT + image + TEXT[::-1] + [5]))
    assert max(ends(harness)) >= len(TEXT + IMAGE + TEXT) - 4


def test_another_image_finds_nothing_of_this_one():
    harness = Harness(num_slots=600)
    harness.finish(harness.run(TEXT + IMAGE + TEXT))
    for image, found in ((IMAGE, len(TEXT + IMAGE + TEXT)), (OTHER, len(TEXT))):
        assert harness.found(TEXT + image + TEXT + [3]) == found


# ---- requests -------------------------------------------------------------------------------------------------------


def asked(tokens: list[int], words: list[int] | None) -> str | None:
    """Why a request is refused; ``words``: its token ids before SGLang put hashes in, if it has images."""
    harness = Harness(num_slots=600)
    req = harness.request(tokens)
    if words is not None:
        req.multimodal_inputs, req.origin_input_ids_unpadded = SimpleNamespace(), array("q", words)
    return refusal(MiniScheduler(harness), harness.tree, req)


def test_hashes_are_taken_from_sglang_only():
    assert asked(TEXT + IMAGE, TEXT + [7] * 12) is None
    assert "input_ids: got 70 at position 40" in str(asked(TEXT + IMAGE, TEXT + [70] * 12))
    assert f"input_ids: got {IMAGE[0]} at position 40" in str(asked(TEXT + IMAGE, None))


# ---- positions ------------------------------------------------------------------------------------------------------


def embedding(is_neox: bool, sections: list[int], **kind: bool) -> MRotaryEmbedding:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_is_cpu", True)  # else, where no server was started, SGLang looks for a GPU's kernel
        return MRotaryEmbedding(16, 12, 512, 100, is_neox, torch.float32, sections, **kind)


KINDS = [
    (True, [1, 2, 3], {}),
    (False, [2, 2, 2], {}),
    (True, [2, 2, 2], {"mrope_interleaved": True}),
]


def found(module: MRotaryEmbedding):
    model = nn.Module()
    model.rotary_emb = module
    return find_rotary(model, {0: 0})


@pytest.mark.parametrize(("is_neox", "sections", "kind"), KINDS, ids=["halves", "pairs", "interleaved"])
def test_keys_turn_as_sglang_turns_them(is_neox, sections, kind):
    module = embedding(is_neox, sections, **kind)
    positions = torch.randint(0, 400, (3, 9), generator=torch.Generator().manual_seed(0))
    keys = torch.randn(9, 2, 16, generator=torch.Generator().manual_seed(1))
    expected, _ = module.forward_native(positions, keys.flatten(1), keys.flatten(1))
    rotary = found(module)
    torch.testing.assert_close(rotary.apply(keys, positions), expected.view_as(keys))
    back = rotary.apply(rotary.apply(keys, positions), positions, inverse=True)
    torch.testing.assert_close(back, keys, atol=1e-5, rtol=1e-5)
    turned = rotary.turn_of(positions, 16).apply(keys[:1])
    torch.testing.assert_close(turned, rotary.apply(keys[:1].expand(9, -1, -1), positions))


def test_an_order_of_axes_that_sglang_does_not_show_counts_as_none():
    module = embedding(True, [2, 2, 2])
    module.axis_map = None
    assert found(module) is None


def test_positions_are_kept_beside_the_keys():
    backend = SimpleNamespace(slot_positions=torch.zeros(3, 10, dtype=torch.int32))
    batch = SimpleNamespace(mrope_positions=torch.tensor([[4, 4], [5, 6], [7, 7]]), out_cache_loc=torch.tensor([8, 2]))
    KVEvictAttentionBackend._note_positions(backend, batch)
    assert backend.slot_positions[:, [8, 2]].tolist() == batch.mrope_positions.tolist()
    assert backend.slot_positions.count_nonzero() == 6
    KVEvictAttentionBackend._note_positions(SimpleNamespace(slot_positions=None), batch)


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Gemma3ForConditionalGeneration, Gemma4ForConditionalGeneration])
def test_attention_to_later_tokens_of_an_image_is_refused(kind):
    sees_later = hasattr(kind.__new__(kind), "prepare_attn_masks")
    (reason,) = refused(is_multimodal=True, sees_later=sees_later)
    assert reason.startswith("an image's tokens attend to later ones of the same image")
    assert refused(sees_later=sees_later) == []
